"""Python functions that the CUDA driver calls, and their lifetimes.

The driver gets one C function of this file and a number as its user data; the number identifies the
Python function here.  Three lifetimes:

* once: removed when it runs (a launch on a stream that does not capture);
* with a graph: the graph holds a CUDA user object, and so does every clone and executable of it;
  when the last of them is destroyed and done, the user object's destructor runs;
* with an executable: set on one of its nodes.  An executable cannot hold user objects, so the
  function is released by the first `synchronize` after the executable was destroyed.

The destructor is libc's `sem_post` on a semaphore and not a Python callback: the driver may run it
late, on its own thread, after the interpreter has ended.  `sweep` reads the semaphores.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ostinato.driver.api import HostFailureListener
from ostinato.driver.callbacks import run_host_function
from ostinato.driver.cuda.libcuda import Libcuda
from ostinato.driver.forking import new_lock
from ostinato.logs import logger

_NO_DESTRUCTOR_SYNC = 1
_MOVE_REFERENCE = 1
_SEMAPHORE_BYTES = 64  # sem_t has 32 with glibc and musl on 64 bit


class _Registered(NamedTuple):
    """A function, and the listeners that are called if it raises."""

    function: Callable[[], object]
    listeners: list[HostFailureListener]


# Global, not of a driver object: graphs outlive the driver object and call into these.
_numbers = itertools.count(1)
_functions: dict[int, _Registered] = {}
_CallbackType = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _run(registered: _Registered | None, number: int | None) -> None:
    if registered is None:
        logger("ostinato").error(
            "host function %s was called after it was given up; it did not run", number
        )
    else:
        run_host_function(registered.function, registered.listeners)


_kept = _CallbackType(lambda number: _run(_functions.get(number or 0), number))
_once = _CallbackType(lambda number: _run(_functions.pop(number or 0, None), number))
for _callback in (_kept, _once):
    # Never freed: the driver may call while the interpreter ends, and libffi gives the place of
    # a freed function to the next one that is made.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_callback))


class HostFunctions:
    """The registry.  `pointer` is the C function for functions that live longer than one call."""

    pointer = ctypes.cast(_kept, ctypes.c_void_p).value or 0
    once_pointer = ctypes.cast(_once, ctypes.c_void_p).value or 0

    def __init__(self, lib: Libcuda) -> None:
        self._lib = lib
        self.listeners: list[HostFailureListener] = []
        """The listeners that are called with a function that raised."""
        self._lock = new_lock()
        self._with_graphs: dict[int, int] = {}
        """The address of the semaphore of each function of a graph, by the function's number."""
        self._of_executables: dict[int, list[int]] = {}
        """The numbers of the functions set on nodes of each executable, by its handle."""
        self._given_up: list[int] = []
        """Functions of destroyed executables: only a launch under way may still call them."""
        self._libc = _load_libc()

    def add(self, function: Callable[[], object]) -> int:
        """Keeps `function` until `release` or its run by `once_pointer`; returns its number."""
        number = next(_numbers)
        _functions[number] = _Registered(function, self.listeners)
        return number

    def add_to_graph(self, graph: int, function: Callable[[], object]) -> int:
        """Keeps `function` as long as `graph` or an object made from it can still call it."""
        self.sweep()
        number = self.add(function)
        semaphore = int(self._libc.calloc(1, _SEMAPHORE_BYTES))
        self._libc.sem_init(semaphore, 0, 0)
        user_object = ctypes.c_void_p()
        post = ctypes.cast(self._libc.sem_post, ctypes.c_void_p)
        status = self._lib["cuUserObjectCreate"](
            ctypes.byref(user_object), semaphore, post, 1, _NO_DESTRUCTOR_SYNC
        )
        if status:  # the function is kept as long as the process, which is safe
            self._libc.free(semaphore)
            return number
        with self._lock:
            self._with_graphs[number] = semaphore
        if self._lib["cuGraphRetainUserObject"](graph, user_object, 1, _MOVE_REFERENCE):
            with self._lock:
                del self._with_graphs[number]
            self._lib["cuUserObjectRelease"](user_object, 1)
        return number

    def release(self, number: int) -> None:
        """Removes a function of `add`; does nothing for one of a graph, which `sweep` removes."""
        if number not in self._with_graphs:
            _functions.pop(number, None)

    def keep_with(self, executable: int, number: int) -> None:
        """Keeps a function of `add` as long as the executable.  Functions set before are kept too:
        launches under way may still call them."""
        with self._lock:
            self._of_executables.setdefault(executable, []).append(number)

    def taken_from(self, executable: int) -> list[int]:
        """Removes and returns the functions of an executable that is about to be destroyed."""
        with self._lock:
            return self._of_executables.pop(executable, [])

    def give_up(self, numbers: Sequence[int]) -> None:
        """Keeps functions of a destroyed executable, which launches under way may still call."""
        with self._lock:
            self._given_up.extend(numbers)

    def take_given_up(self) -> list[int]:
        """Returns functions of destroyed executables, to release once the device has finished."""
        with self._lock:  # `give_up` must not append to the list that is returned
            taken, self._given_up = self._given_up, []
            return taken

    def sweep(self) -> None:
        """Removes the functions whose graphs are gone."""
        with self._lock:
            waiting = list(self._with_graphs.items())
        for number, semaphore in waiting:
            value = ctypes.c_int()
            self._libc.sem_getvalue(semaphore, ctypes.byref(value))
            if value.value:
                with self._lock:
                    mine = self._with_graphs.pop(number, None)
                if mine is not None:
                    _functions.pop(number, None)
                    self._libc.free(semaphore)

    def find(self, pointer: int, user_data: int) -> Callable[[], object] | None:
        """Returns the Python function of a host node's raw values; None for another library's."""
        if pointer not in (self.pointer, self.once_pointer):
            return None
        registered = _functions.get(user_data)
        return None if registered is None else registered.function


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.calloc.restype = ctypes.c_void_p
    libc.calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    libc.free.restype = None
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    libc.sem_getvalue.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return libc
