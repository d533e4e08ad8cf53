/* A call of `pool_run` opens a *round*, one at a time.  Threads take the parts one by one from a
 * counter, so that a thread that is slow, or starts late, takes fewer.
 *
 * Helper threads poll for a round for `AWAKE_NS`, which bridges the gap between two kernels of a
 * step, and then sleep.  When no part is left, the caller closes the round and waits for the
 * helpers inside.  If that takes `LATE_NS` longer than some parts do, a helper lost its processor
 * in the middle of a part, since other processes use it.  Then one helper fewer is used for a while,
 * since a step has some hundred rounds, each of which would wait.  After `backoff_ns`, which
 * doubles with each such wait, the helper is used again.
 *
 * Entering and leaving.  A helper increments `inside`, and then reads whether the round is still
 * open; the caller closes the round, and then reads `inside`.  All of these are sequentially
 * consistent, so at least one of the two notices the other.  Likewise a helper sets `sleeping` and
 * then checks for a round, and a caller opens a round and then checks `sleeping`. */

#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define AWAKE_NS 60000
#define LATE_NS 300000
#define FIRST_BACKOFF_NS 8000000
#define LAST_BACKOFF_NS 500000000
#define CALM_ROUNDS 2000 /* rounds without a late one that reset the backoff */
#define LINE 64

typedef struct {
    pool *pool;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_int sleeping;
    int woken; /* guarded by `lock` */
    int index;
} helper;

struct pool {
    /* In cache lines of their own, since all threads change them. */
    _Alignas(LINE) atomic_int next;
    _Alignas(LINE) atomic_int inside;
    /* The round.  `count`, `task` and `context` are written while no round is open and no thread is
     * inside. */
    _Alignas(LINE) atomic_uint open; /* the open round's number; 0 if none is open */
    atomic_int allowed;              /* helpers that may take part */
    atomic_int stopping;
    atomic_int caller_waits;
    int count;
    pool_task task;
    void *context;
    /* Used by the caller that holds `busy`. */
    pthread_mutex_t busy;
    pthread_mutex_t lock;
    pthread_cond_t done;
    unsigned rounds;
    int64_t retry_at, backoff_ns;
    int calm;
    /* Fixed, or changed by `pool_prepare`. */
    int wanted, started;
    unsigned forks;
    helper *helpers;
};

static atomic_uint forks; /* number of forks between this process and the first */

static void
forked(void)
{
    atomic_fetch_add(&forks, 1);
}

int
pool_set_up(void)
{
    return pthread_atfork(NULL, NULL, forked);
}

static int64_t
now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void
pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* Runs parts until none is left.  Returns the number of parts run. */
static int
take_parts(pool *self, int thread)
{
    int count = self->count, taken = 0, index;
    pool_task task = self->task;
    void *context = self->context;
    for (; (index = atomic_fetch_add_explicit(&self->next, 1, memory_order_relaxed)) < count;
         taken++)
        task(context, index, thread);
    return taken;
}

/* -------------------------------------------------------------------------------------- helpers */

static int
has_work(helper *self, unsigned last)
{
    unsigned open = atomic_load(&self->pool->open);
    return atomic_load(&self->pool->stopping) ||
           (open != 0 && open != last && self->index < atomic_load(&self->pool->allowed));
}

static void
wait_for_work(helper *self, unsigned last)
{
    int64_t end = now() + AWAKE_NS;
    while (self->index < atomic_load_explicit(&self->pool->allowed, memory_order_relaxed)) {
        for (int i = 0; i < 32; i++) {
            if (has_work(self, last))
                return;
            pause_briefly();
        }
        if (now() >= end)
            break;
    }
    pthread_mutex_lock(&self->lock);
    self->woken = 0;
    atomic_store(&self->sleeping, 1);
    while (!self->woken && !has_work(self, last))
        pthread_cond_wait(&self->wake, &self->lock);
    atomic_store(&self->sleeping, 0);
    pthread_mutex_unlock(&self->lock);
}

static void *
help(void *argument)
{
    helper *self = argument;
    pool *pool = self->pool;
    unsigned last = 0;
    while (!atomic_load(&pool->stopping)) {
        wait_for_work(self, last);
        atomic_fetch_add(&pool->inside, 1);
        unsigned open = atomic_load(&pool->open);
        if (open != 0 && open != last && self->index < atomic_load(&pool->allowed)) {
            last = open;
            take_parts(pool, self->index + 1);
        }
        if (atomic_fetch_sub(&pool->inside, 1) == 1 && atomic_load(&pool->caller_waits)) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->lock);
        }
    }
    return NULL;
}

/* -------------------------------------------------------------------------------------- callers */

static void wake(helper *self)
{
    pthread_mutex_lock(&self->lock);
    self->woken = 1;
    pthread_cond_signal(&self->wake);
    pthread_mutex_unlock(&self->lock);
}

/* Waits until no thread is inside the closed round, which began at `opened`; the caller has run
 * `taken` of its parts.  Allows one helper fewer if the wait was long. */
static void
wait_for_helpers(pool *self, int64_t opened, int taken)
{
    if (atomic_load(&self->inside) == 0)
        return;
    int64_t begin = now(), end = begin + AWAKE_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load(&self->inside) == 0)
                return;
            pause_briefly();
        }
    } while (now() < end);
    pthread_mutex_lock(&self->lock);
    atomic_store(&self->caller_waits, 1);
    while (atomic_load(&self->inside) != 0)
        pthread_cond_wait(&self->done, &self->lock);
    atomic_store(&self->caller_waits, 0);
    pthread_mutex_unlock(&self->lock);
    int64_t end_of_wait = now();
    if (end_of_wait - begin > LATE_NS + 3 * (begin - opened) / (taken ? taken : 1)) {
        int allowed = atomic_load(&self->allowed);
        atomic_store(&self->allowed, allowed > 0 ? allowed - 1 : 0);
        self->retry_at = end_of_wait + self->backoff_ns;
        self->backoff_ns *= 2;
        if (self->backoff_ns > LAST_BACKOFF_NS)
            self->backoff_ns = LAST_BACKOFF_NS;
        self->calm = 0;
    }
}

/* Returns the number of helpers for the next round. */
static int
allow(pool *self)
{
    int allowed = atomic_load(&self->allowed);
    if (allowed < self->started) {
        int64_t time = now();
        if (time >= self->retry_at) {
            atomic_store(&self->allowed, ++allowed);
            self->retry_at = time + self->backoff_ns;
        }
    }
    else if (++self->calm >= CALM_ROUNDS) {
        self->calm = 0;
        self->backoff_ns = FIRST_BACKOFF_NS;
    }
    return allowed;
}

void
pool_run(pool *self, int count, pool_task task, void *context)
{
    if (count <= 1 || self->started == 0 || pthread_mutex_trylock(&self->busy) != 0) {
        for (int index = 0; index < count; index++)
            task(context, index, 0);
        return;
    }
    int allowed = allow(self);
    self->count = count;
    self->task = task;
    self->context = context;
    atomic_store(&self->next, 0);
    if (++self->rounds == 0)
        self->rounds = 1;
    int64_t opened = now();
    atomic_store(&self->open, self->rounds);
    for (int i = 0; i < allowed && i < count - 1; i++) {
        helper *one = &self->helpers[i];
        if (atomic_load(&one->sleeping))
            wake(one);
    }
    int taken = take_parts(self, 0);
    atomic_store(&self->open, 0);
    wait_for_helpers(self, opened, taken);
    pthread_mutex_unlock(&self->busy);
}

/* ------------------------------------------------------------------------------------- lifetime */

static void
reset(pool *self)
{
    atomic_init(&self->next, 0);
    atomic_init(&self->inside, 0);
    atomic_init(&self->open, 0);
    atomic_init(&self->allowed, 0);
    atomic_init(&self->stopping, 0);
    atomic_init(&self->caller_waits, 0);
    pthread_mutex_init(&self->busy, NULL);
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->done, NULL);
    self->started = 0;
    self->retry_at = 0;
    self->backoff_ns = FIRST_BACKOFF_NS;
    self->calm = 0;
    self->forks = atomic_load(&forks);
}

pool *
pool_create(int threads)
{
    void *memory = NULL;
    if (posix_memalign(&memory, LINE, sizeof(pool)) != 0)
        return NULL;
    pool *self = memory;
    self->rounds = 0;
    self->wanted = threads - 1;
    self->helpers = calloc((size_t)threads, sizeof *self->helpers);
    if (self->helpers == NULL) {
        free(self);
        return NULL;
    }
    reset(self);
    return self;
}

void
pool_prepare(pool *self)
{
    if (self->forks != atomic_load(&forks))
        reset(self); /* the threads are the parent's, and one of them may hold the locks for good */
    if (self->started == self->wanted)
        return;
    /* Helpers block all signals, which the program's own threads handle. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (self->started < self->wanted) {
        helper *one = &self->helpers[self->started];
        one->pool = self;
        one->index = self->started;
        one->woken = 0;
        atomic_init(&one->sleeping, 0);
        pthread_mutex_init(&one->lock, NULL);
        pthread_cond_init(&one->wake, NULL);
        if (pthread_create(&one->thread, NULL, help, one) != 0) {
            self->wanted = self->started; /* the process may have no more threads */
            break;
        }
        self->started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    atomic_store(&self->allowed, self->started);
}

void
pool_destroy(pool *self)
{
    if (self->forks == atomic_load(&forks)) {
        atomic_store(&self->stopping, 1);
        for (int i = 0; i < self->started; i++)
            wake(&self->helpers[i]);
        for (int i = 0; i < self->started; i++) {
            helper *one = &self->helpers[i];
            pthread_join(one->thread, NULL);
            pthread_cond_destroy(&one->wake);
            pthread_mutex_destroy(&one->lock);
        }
        pthread_cond_destroy(&self->done);
        pthread_mutex_destroy(&self->lock);
        pthread_mutex_destroy(&self->busy);
    }
    free(self->helpers);
    free(self);
}

int
pool_threads(const pool *self)
{
    return self->wanted + 1;
}
