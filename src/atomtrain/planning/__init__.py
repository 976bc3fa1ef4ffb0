"""Static costs and a machine -> the cheapest plan that fits, its cost known beforehand."""

from atomtrain.planning.layout import Layout, Piece
from atomtrain.planning.machine import Machine
from atomtrain.planning.plan import Plan, Request
from atomtrain.planning.schedule import Phase, Visit, evaluation_visits, training_visits
from atomtrain.planning.search import make_plan
from atomtrain.planning.shape import Shape

__all__ = [
    "Layout",
    "Machine",
    "Phase",
    "Piece",
    "Plan",
    "Request",
    "Shape",
    "Visit",
    "evaluation_visits",
    "make_plan",
    "training_visits",
]
