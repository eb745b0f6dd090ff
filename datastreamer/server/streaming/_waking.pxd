"""How the live thread waits for a commit, and how soon it runs then: calls of the system."""

from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #include <poll.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/stat.h>
    #include <time.h>
    #if defined(__linux__)
    #include <sched.h>
    #include <sys/epoll.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    #endif

    #define EARLY 1
    #define REPORTS 2

    /* A descriptor that waits for the next write to the eventfd `fd`, which then need not be read:
       a system call less for each commit; and for `reports` (-1: none), which are read. -1 if there
       is none. */
    static int open_watch(int fd, int reports) {
    #if defined(__linux__)
        struct epoll_event event;
        struct stat kind;
        int watch;
        memset(&event, 0, sizeof event);
        event.events = EPOLLIN | EPOLLET;
        /* A pipe that is not read becomes full, and accepts no further write then. */
        if (fstat(fd, &kind) || S_ISFIFO(kind.st_mode) || S_ISSOCK(kind.st_mode)) return -1;
        watch = epoll_create1(EPOLL_CLOEXEC);
        if (watch >= 0 && epoll_ctl(watch, EPOLL_CTL_ADD, fd, &event)) {
            close(watch);
            return -1;
        }
        event.events = EPOLLIN;
        event.data.u32 = REPORTS;
        if (watch >= 0 && reports >= 0 && epoll_ctl(watch, EPOLL_CTL_ADD, reports, &event)) {
            close(watch);
            return -1;
        }
        return watch;
    #else
        return -1;
    #endif
    }

    /* The eventfd that a writer writes to when a commit begins. At its end, some tens of
       microseconds later, it writes to the eventfd of `open_watch`; a sleeping thread needs as long
       to wake. */
    typedef struct {
        int fd;             /* -1: none */
        int watched;
        int late;           /* commits in a row that ended later than the thread waits */
        int64_t rest_end;   /* it is not watched before, in ns of the coarse clock; 0: it is */
    } EarlyWaker;

    /* The longest wait for a commit's end without a sleep. */
    #define COMMIT_NS 100000
    #define MOST_LATE 8
    /* If the writer or another program had the thread's CPU meanwhile for more than this, all CPUs
       are busy: then no sleeping thread is slow to wake, and one that waits loses its turn. */
    #define LONG_NS 300000
    #define REST_NS 10000000000

    #if defined(__linux__)
    static int64_t time_of(clockid_t clock) {
        struct timespec t;
        clock_gettime(clock, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    #endif

    /* Have `watch` report writes to it, or (`on` is 0) not. */
    static void watch_early(int watch, EarlyWaker *it, int on) {
    #if defined(__linux__)
        struct epoll_event event;
        if (watch < 0 || it->fd < 0) return;
        if (it->rest_end) {
            if (time_of(CLOCK_MONOTONIC_COARSE) < it->rest_end) on = 0;
            else it->rest_end = 0;
        }
        if (on == it->watched) return;
        memset(&event, 0, sizeof event);
        event.events = EPOLLIN | EPOLLET;
        event.data.u32 = EARLY;
        if (!epoll_ctl(watch, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, it->fd, &event)) it->watched = on;
    #endif
    }

    #if defined(__linux__)
    /* Wait for the commit's end without a sleep; whether it came. */
    static int wait_for_end(int watch, EarlyWaker *it) {
        struct epoll_event event;
        uint64_t cpu;
        int64_t began = time_of(CLOCK_MONOTONIC), had = time_of(CLOCK_THREAD_CPUTIME_ID), took;
        int ended = 0;
        /* The number of the writer's, plus 1. */
        if (read(it->fd, &cpu, 8) != 8) return 0;
        do {
            if (cpu == (uint64_t)sched_getcpu() + 1) sched_yield();
            ended = epoll_wait(watch, &event, 1, 0) > 0 && event.data.u32 != EARLY;
            took = time_of(CLOCK_MONOTONIC) - began;
        } while (!ended && took < COMMIT_NS);
        it->late = took < COMMIT_NS ? 0 : it->late + 1;
        if (it->late == MOST_LATE
            || (took > LONG_NS && took - (time_of(CLOCK_THREAD_CPUTIME_ID) - had) > LONG_NS)) {
            it->late = 0;
            it->rest_end = time_of(CLOCK_MONOTONIC_COARSE) + REST_NS;
        }
        return ended;
    }
    #endif

    /* Wait for a write to `fd` or a report, at most this long (-1: forever); whether `fd` has to be
       read. */
    static int wait_for_write(int fd, int watch, int reports, EarlyWaker *early, int milliseconds) {
    #if defined(__linux__)
        struct epoll_event event;
        char ignored[4096];
        if (watch >= 0) {
            memset(&event, 0, sizeof event);
            while (epoll_wait(watch, &event, 1, milliseconds) > 0 && event.data.u32 == EARLY
                   && !wait_for_end(watch, early) && !early->rest_end);
            if (event.data.u32 == REPORTS)
                while (read(reports, ignored, sizeof ignored) == sizeof ignored);
            return 0;
        }
    #endif
        struct pollfd it = {fd, POLLIN, 0};
        return poll(&it, 1, milliseconds) > 0;
    }

    /* As long as it sends a commit to 128 clients: it is rarely interrupted between them. */
    #define SOON_NS 500000

    /* Ask that this thread runs soon when it is woken, before the one that woke it if they share a
       CPU, or (`soon` is 0) that it does not. A short slice asks Linux for that from 6.12 on; older
       ones ignore it. `usual` keeps the slice that it had before, in ns. */
    static void ask_to_run_soon(int soon, uint64_t *usual) {
    #if defined(__linux__) && defined(SYS_sched_getattr)
        struct {
            uint32_t size, policy;
            uint64_t flags;
            int32_t nice;
            uint32_t priority;
            uint64_t runtime, deadline, period;
        } has;
        memset(&has, 0, sizeof has);
        if (syscall(SYS_sched_getattr, 0, &has, sizeof has, 0) || has.policy != SCHED_OTHER) return;
        has.size = sizeof has;
        if (soon) *usual = has.runtime;
        has.runtime = soon ? SOON_NS : *usual;
        syscall(SYS_sched_setattr, 0, &has, 0);
    #endif
    }
    """
    ctypedef struct EarlyWaker:
        int fd
    int open_watch(int fd, int reports) nogil
    void watch_early(int watch, EarlyWaker* it, bint on) nogil
    bint wait_for_write(int fd, int watch, int reports, EarlyWaker* early, int milliseconds) nogil
    void ask_to_run_soon(bint soon, uint64_t* usual) nogil
