"""Reports of Linux when a file is written to, by whatever program."""

import os

cdef extern from *:
    """
    #include <errno.h>
    #if defined(__linux__)
    #include <stdio.h>
    #include <sys/inotify.h>
    #include <unistd.h>
    #endif

    /* A descriptor that is readable after writes to the open `file`; -1 with `errno` if none. */
    static int open_reports(int file) {
    #if defined(__linux__)
        char name[32];
        int reports = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
        if (reports < 0) return -1;
        /* The file itself, whatever has its path now. */
        snprintf(name, sizeof name, "/proc/self/fd/%d", file);
        if (inotify_add_watch(reports, name, IN_MODIFY) < 0) {
            int why = errno;
            close(reports);
            errno = why;
            return -1;
        }
        return reports;
    #else
        errno = ENOSYS;
        return -1;
    #endif
    }
    """
    int open_reports(int file)

from libc.errno cimport errno


def reports_of_writes(int file):
    """A non-blocking descriptor that becomes readable when `file`, a descriptor, is written to or
    its size changes, but not when memory that maps it is stored to. What was not read yet is not
    reported again: read first, and look at the file then. Raises `OSError`."""
    cdef int reports = open_reports(file)
    if reports < 0:
        raise OSError(errno, os.strerror(errno))
    return reports
