/* Threads that share one piece of work at a time, and sleep otherwise. */

#ifndef OSTINATO_POOL_H
#define OSTINATO_POOL_H

typedef struct pool pool;

/* A part of the work, `index` of so many; `thread` is below the pool's number of threads, and no
 * two calls at a time have the same. */
typedef void (*pool_task)(void *context, int index, int thread);

/* Once in a process, before any pool.  Not 0 if it failed. */
int pool_set_up(void);
/* NULL without memory.  Threads are started by `pool_prepare`. */
pool *pool_create(int threads);
/* Before `pool_run`, with no other `pool_prepare` at the same time: starts the threads that are
 * missing, anew in a forked child.  With fewer than wanted the pool works as well. */
void pool_prepare(pool *self);
/* Runs parts 0 to count - 1, and returns when all are done.  The caller works too; alone, while
 * another call has the pool. */
void pool_run(pool *self, int count, pool_task task, void *context);
/* No call may be under way. */
void pool_destroy(pool *self);
int pool_threads(const pool *self);

#endif
