/* Threads that share one piece of work at a time, and sleep otherwise. */

#ifndef OSTINATO_POOL_H
#define OSTINATO_POOL_H

typedef struct pool pool;

/* Runs part `index` of the work.  `thread` is below the pool's number of threads; concurrent calls
 * have different ones. */
typedef void (*pool_task)(void *context, int index, int thread);

/* Must be called once in a process, before any pool is created.  Returns 0 on success. */
int pool_set_up(void);
/* Returns NULL without memory.  Starts no threads; `pool_prepare` does. */
pool *pool_create(int threads);
/* Starts the missing threads, all of them in a forked child.  Must be called before `pool_run`, and
 * by one thread at a time.  The pool also works if not all threads can be started. */
void pool_prepare(pool *self);
/* Runs parts 0 to count - 1, and returns when all are done.  The calling thread works too, and runs
 * all parts itself while another call uses the pool. */
void pool_run(pool *self, int count, pool_task task, void *context);
/* Ends the threads and frees the pool.  No `pool_run` may be in progress. */
void pool_destroy(pool *self);
int pool_threads(const pool *self);

#endif
