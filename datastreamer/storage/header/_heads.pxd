"""The two numbers of a `records.Head`. (Python's indexing of a subclass of tuple is slow.)"""

from cpython.object cimport PyObject

cdef extern from "Python.h":
    # A borrowed reference.
    PyObject* PyTuple_GET_ITEM(object, Py_ssize_t at) noexcept
    Py_ssize_t Py_SIZE(object) noexcept


cdef inline int _check(head) except -1:
    if not isinstance(head, tuple) or Py_SIZE(head) != 2:
        raise TypeError("a head is a pair of numbers")
    return 0


cdef inline object length_of(head):
    _check(head)
    return <object>PyTuple_GET_ITEM(head, 0)


cdef inline object entries_of(head):
    _check(head)
    return <object>PyTuple_GET_ITEM(head, 1)
