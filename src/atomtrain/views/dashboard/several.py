"""Several runs side by side: folders that are named, and the runs in a folder of runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from atomtrain.errors import ConfigError
from atomtrain.views.dashboard.source import FolderSource, Message, Source
from atomtrain.views.runs.files import EVENTS_FILE


def source_of(folders: Sequence[Path]) -> Source:
    """Return what follows a run, or several.

    Raises:
        ConfigError: a folder is none of a run, of a peer, or of runs.
    """
    if len(folders) == 1 and not is_folder_of_runs(folders[0]):
        return FolderSource(folders[0])
    return RunsSource(folders)


def is_folder_of_runs(folder: Path) -> bool:
    """Return whether there are runs in a folder, rather than peers or nothing."""
    return any(folder.glob(f"*/*/{EVENTS_FILE}"))


class RunsSource:
    """Follows several runs; those that come into a folder of runs are taken in."""

    def __init__(self, targets: Sequence[Path]) -> None:
        """Follow what is there, and what comes.

        Raises:
            ConfigError: a target is no folder of a run, of a peer, or of runs.
        """
        self.title = ", ".join(dict.fromkeys(target.absolute().name for target in targets))
        self._parents = [target for target in targets if is_folder_of_runs(target)]
        self._sources: dict[Path, FolderSource] = {}
        for target in targets:
            if target not in self._parents:
                self._take(target)
        self._look()

    @property
    def sources(self) -> list[FolderSource]:
        """The runs, in the order in which they were found; each has a title of its own."""
        return [*self._sources.values()]

    def poll(self) -> list[Message]:
        """Return what is new since the last call; never waits."""
        self._look()
        return [message for source in self.sources for message in source.poll()]

    def snapshot(self) -> list[Message]:
        """Return what a view needs to begin with."""
        return [message for source in self.sources for message in source.snapshot()]

    def _look(self) -> None:
        for parent in self._parents:
            for folder in sorted(path for path in parent.glob("*") if path.is_dir()):
                with contextlib.suppress(ConfigError):  # it holds no run, perhaps not yet
                    self._take(folder)

    def _take(self, folder: Path) -> None:
        key = folder.resolve()
        if key in self._sources:
            return
        source = FolderSource(folder)
        taken = {other.title for other in self._sources.values()}
        names = (f"{source.title} ({number})" for number in count(2))
        if source.title in taken:
            source.title = next(name for name in names if name not in taken)
        self._sources[key] = source
