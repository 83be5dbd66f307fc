"""One function over many small tasks, in processes, with the results in the order of the tasks."""

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from typing import Generic, TypeVar

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_LOT = 16
"""Tasks that a process is handed at once."""
LOTS_AHEAD = 3
"""Such lots that are under way for each process."""
_MEMORY = "/dev/shm"


def in_processes(
    function: Callable[[_Task], _Result], tasks: Iterable[_Task], *, workers: int, lot: int = _LOT
) -> Iterator[_Result]:
    """Yield `function` of each task, in order; a limited number of them is under way, so `tasks` may have no end.

    workers: processes; 1 works in this one. The function and what it takes and returns must be picklable. Processes
    import the main module anew, so a script that asks for them needs the usual `if __name__ == "__main__":`.
    """
    if workers == 1:
        yield from map(function, tasks)
        return
    coming = iter(tasks)
    waiting: deque[Future[list[_Result]]] = deque()
    # A forked child would inherit locks that this process's threads hold.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            while some := tuple(islice(coming, lot)):
                waiting.append(pool.submit(_Each(function), some))
                if len(waiting) >= workers * LOTS_AHEAD:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class _Each(Generic[_Task, _Result]):
    """A function over a lot of tasks, as something that can be sent to a process."""

    def __init__(self, function: Callable[[_Task], _Result]) -> None:
        self._function = function

    def __call__(self, tasks: Sequence[_Task]) -> list[_Result]:
        return [self._function(task) for task in tasks]


def memory_folder(room: int) -> str | None:
    """Memory that is a file system and has so many bytes to spare, if there is one: what is written there never sees
    a disk. Containers often have little of it.
    """
    if not os.access(_MEMORY, os.W_OK) or shutil.disk_usage(_MEMORY).free < room:
        return None
    return _MEMORY
