"""Keeps two models that are built at the same time from asking for the same answer.

A model claims the requests that it is about to ask. Another one that needs some of them leaves
these out of its own job, and then waits until the first is done with them.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dbt_llm.errors import CancelledError

if TYPE_CHECKING:
    from dbt_llm.spool import Prepared, RequestFile

_POLL_S = 0.2


@dataclass
class _Claim:
    files: "list[RequestFile]"
    done: threading.Event


class InFlight:
    """The requests that jobs of this process ask just now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[str, _Claim] = {}

    def claim(
        self, run_id: str, prepare: "Callable[[list[RequestFile]], Prepared]"
    ) -> "tuple[Prepared, list[threading.Event]]":
        """Claim what `prepare` leaves of a run's requests, given those of all other runs.

        Returns:
            What the run is to ask, and the events of the runs that it has to wait for afterwards.
        """
        with self._lock:
            others = list(self._claims.values())
            prepared = prepare([file for claim in others for file in claim.files])
            if prepared.files:
                self._claims[run_id] = _Claim(prepared.files, threading.Event())
            return prepared, [claim.done for claim in others] if prepared.left_to_others else []

    def release(self, run_id: str) -> None:
        """End a run's claim; its answers are stored, or never will be."""
        with self._lock:
            claim = self._claims.pop(run_id, None)
        if claim is not None:
            claim.done.set()


def wait_for(events: list[threading.Event], cancelled: threading.Event) -> None:
    """Wait until all events are set.

    Raises:
        CancelledError: the user interrupted.
    """
    for event in events:
        while not event.wait(_POLL_S):
            if cancelled.is_set():
                raise CancelledError("Interrupted while waiting for another model's answers.")
