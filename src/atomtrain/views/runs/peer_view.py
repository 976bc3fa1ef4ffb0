"""The state of one peer as its events tell it: table cells while it runs, a summary at the end."""

from __future__ import annotations

from collections import deque

from atomtrain.events import Event
from atomtrain.views.runs import event_text as text

KEPT_SAMPLES = 3


class PeerView:
    """The newest event of each kind from one peer, and the table cells that follow from them."""

    def __init__(self, name: str) -> None:
        self.name = text.printable(name)
        self.samples: deque[Event] = deque(maxlen=KEPT_SAMPLES)
        self._newest: dict[str, Event] = {}

    def apply(self, event: Event) -> None:
        """Take in one event; events of unknown kinds change nothing that is shown."""
        kind = event["event"]
        if kind == "run_started":  # the peer came back: its former end is no longer true
            self._newest.pop("run_finished", None)
            self._newest.pop("peer_lost", None)
        elif kind == "sample":
            self.samples.append(event)
        self._newest[kind] = event

    def newest(self, kind: str) -> Event:
        """Return the newest event of `kind`, or an empty one."""
        return self._newest.get(kind, {})

    @property
    def state(self) -> str:
        """One of starting, training, completed, interrupted, failed, lost."""
        if "run_finished" in self._newest:
            return text.words(self.newest("run_finished"), "reason") or "finished"
        if "peer_lost" in self._newest:
            return "lost"
        return "training" if "step" in self._newest else "starting"

    def progress_cells(self) -> list[str]:
        """Return peer, step, loss, bits per byte, tokens/s, time left or state, peers, round."""
        step, evaluation, last_round = map(self.newest, ("step", "evaluation", "round"))
        left_s = text.number(step, "time_left_s")
        running = self.state == "training" and left_s is not None
        round_parts = (text.count(last_round, "round"), text.words(last_round, "outcome"))
        return [
            self.name,
            text.steps_text(step) or "-",
            text.decimal(step, "loss") or "-",
            text.decimal(evaluation, "bits_per_byte") or "-",
            text.rate(step) or "-",
            text.duration(left_s) if running and left_s is not None else self.state,
            text.count(max(step, self.newest("membership"), key=text.time_of_s), "peers") or "-",
            " ".join(part for part in round_parts if part) or "-",
        ]

    def memory_cells(self) -> list[str]:
        """Return the device memory in words and the share of time spent waiting for the link."""
        started, step = self.newest("run_started"), self.newest("step")
        return [
            text.memory_text({**started, **step}) or "-",
            text.share(step, "link_wait_share") or "-",
        ]

    def summary(self) -> list[str]:
        """Return the lines that say how the peer's run ended and what it left behind."""
        end, step = self.newest("run_finished"), self.newest("step")
        at = text.count(end, "step") or text.count(step, "step")
        lost = self.newest("peer_lost")
        held_out = self.newest("evaluation")
        loss = text.decimal(end, "loss") or text.decimal(step, "loss")
        bits = text.decimal(end, "bits_per_byte") or text.decimal(held_out, "bits_per_byte")
        path = text.words(end, "checkpoint") or text.words(self.newest("checkpoint"), "path")
        held_out_margin = text.decimal(held_out, "reward_margin")
        accuracy = text.share(held_out, "accuracy")
        unit = "nats per token" if held_out_margin is None else "nats per pair"
        unit = unit if accuracy is None else "nats per text"
        facts = {
            "reason": text.words(lost, "reason"),
            "loss": text.tag(loss, f"{{}} {unit}"),
            "held-out": text.tag(bits, "{} bits per byte"),
            "preferred": text.tag(
                text.share(held_out, "reward_accuracy"), f"{{}}, margin {held_out_margin} nats"
            ),
            "accuracy": text.tag(accuracy, "{} of held-out texts"),
            "duration": text.optional(text.duration, text.number(end, "duration_s")),
            "checkpoint": path,
            "picture": text.words(end, "picture"),
            "output": text.words(lost, "log"),
        }
        lines = [f"{self.name}: {self.state}" + (f" at step {at}" if at else "")]
        lines += [f"  {label:<11}{value}" for label, value in facts.items() if value]
        return lines + [f"  {'sample':<11}{text.sample_text(sample)}" for sample in self.samples]
