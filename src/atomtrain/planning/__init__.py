"""Static costs and a machine -> the cheapest plan that fits, its cost known beforehand."""

from atomtrain.planning.plan.layout import Layout, Piece
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.plan import Plan, Request
from atomtrain.planning.plan.shape import Phase, Shape, Visit, evaluation_visits, training_visits
from atomtrain.planning.search.search import make_plan

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
