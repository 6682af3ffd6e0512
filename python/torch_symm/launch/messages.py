"""The reports of rank processes: through a queue, or as lines of a program's output, which survive any exit."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from .watch import StalledError, stopped, which

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessContext

#: The text before each message in a program's output. Libraries may write other text, also without a newline.
MARK = "torch_symm.message "
POLL_S = 0.2
#: Number of polls for which the launcher waits for the rest of a message after all ranks have ended.
PARTIAL_POLLS = 25


def reported(
    started: ProcessContext | Sequence[ProcessContext],
    results: Any,
    expected: int | None,
    counts: type = object,
    watched: Callable[[], None] = lambda: None,
) -> Iterator[Any]:
    """Yields the messages in ``results`` until ``expected`` of type ``counts`` have arrived and all ranks have ended.

    If ``expected`` is None, yields until all ranks have ended. Calls ``watched`` periodically; its exceptions end the
    run.

    Raises:
        StalledError: the processes have ended without some of the messages.
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a process has failed.
    """
    contexts = started if isinstance(started, Sequence) else [started]
    left, late = expected, 0
    with closing(_Reader(results)) as reader:
        while left != 0:
            try:
                message = reader.get()
            except queue.Empty:
                if all([each.join(timeout=0) for each in contexts]) and results.empty():
                    late += 1
                    if not reader.is_idle and late < PARTIAL_POLLS:
                        continue
                    if left is None:
                        return
                    raise StalledError(f"the ranks ended with {left} results missing") from None
                watched()
                continue
            if left is not None:
                left -= isinstance(message, counts)
            yield message
    while not all([each.join(timeout=POLL_S) for each in contexts]):
        watched()


class _Reader:
    """Reads a queue on a thread, which blocks for ever if a rank was killed while its message was in the pipe."""

    def __init__(self, results: Any) -> None:
        self._results = results
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        #: True if the thread does not read. It reads only for a call of `get`, so that no message is lost.
        self.is_idle = True
        threading.Thread(target=self._run, name="symm-reports", daemon=True).start()

    def _run(self) -> None:
        while self._wanted.get():
            try:
                self._found.put((self._results.get(timeout=POLL_S), None))
            except BaseException as error:
                self._found.put((None, error))

    def get(self) -> Any:
        """Returns the next message.

        Raises:
            queue.Empty: no message has arrived within some :data:`POLL_S`, or not all of it.
        """
        if self.is_idle:
            self._wanted.put(True)
            self.is_idle = False
        message, error = self._found.get(timeout=2 * POLL_S)
        self.is_idle = True
        if error is not None:
            raise error
        return message

    def close(self) -> None:
        self._wanted.put(False)


def reported_in_time(
    started: ProcessContext, results: Any, expected: int, first_s: float, still_s: float, counts: type = object
) -> Iterator[Any]:
    """Like :func:`reported`, and ends the run if no message arrives for ``first_s``, or for ``still_s`` after another.

    After the last message the processes must end within ``still_s``.

    Raises:
        StalledError: as above; the text names the ranks that are stopped, or otherwise those that still run.
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a process has failed.
    """
    since, limit_s = time.monotonic(), first_s

    def watched() -> None:
        if time.monotonic() - since <= limit_s:
            return
        halted = stopped(started.processes)
        late = halted or [rank for rank, process in enumerate(started.processes) if process.is_alive()]
        who = which(late, len(started.processes))
        raise StalledError(f"no message for {limit_s:g} s: {who} {'stopped' if halted else 'did not end'}")

    for message in reported(started, results, expected, counts, watched):
        yield message
        since, limit_s = time.monotonic(), still_s


def send(message: Mapping[str, Any]) -> None:
    """Sends a message from a program to the process that runs it."""
    print(f"\n{MARK}{json.dumps(message)}", flush=True)


def received(output: str) -> list[dict[str, Any]]:
    """Returns the messages in a program's output, without a message that is cut off because the program was killed."""
    found, decoder, at = list[dict[str, Any]](), json.JSONDecoder(), output.find(MARK)
    while at >= 0:
        at += len(MARK)
        with suppress(json.JSONDecodeError):
            message, at = decoder.raw_decode(output, at)
            found.append(message)
        at = output.find(MARK, at)
    return found


def sentence(error: BaseException) -> str:
    """Returns the type and the first line of ``error``, or of its cause if ``error`` has several lines."""
    while error.__cause__ is not None and "\n" in str(error).strip():
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def in_a_line(error: Exception) -> str:
    """Returns the type and first line of ``error``."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
