"""POSIX threads, for C code that runs without the GIL."""

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_join(pthread_t, void**)
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_cond_init(pthread_cond_t*, const void*)
    int pthread_cond_wait(pthread_cond_t*, pthread_mutex_t*)
    int pthread_cond_signal(pthread_cond_t*)
    int pthread_cond_broadcast(pthread_cond_t*)
    int pthread_cond_destroy(pthread_cond_t*)

cdef extern from *:
    """
    #include <pthread.h>
    #include <signal.h>

    /* Start a thread that receives no signal but those of its own faults: a signal's handler belongs
       to a thread of Python, and would not interrupt what the main thread waits for. 0, or an
       errno. */
    static inline int create_without_signals(pthread_t *thread, void *(*run)(void *), void *what) {
        sigset_t all, before;
        int failed;
        sigfillset(&all);
        sigdelset(&all, SIGSEGV);
        sigdelset(&all, SIGBUS);
        sigdelset(&all, SIGABRT);
        pthread_sigmask(SIG_SETMASK, &all, &before);  /* a new thread inherits it */
        failed = pthread_create(thread, NULL, run, what);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return failed;
    }
    """
    int create_without_signals(pthread_t*, void* (*)(void*) noexcept nogil, void*) nogil
