// A few threads that run one function together: barriers inside, work handed out by counters, asleep when there is
// none.
//
// Whoever calls pool_run is thread 0. At a barrier a thread spins for at most SPIN_NS, then sleeps; between runs the
// others sleep, for what lies between takes longer than a spin: the next token, or experts elsewhere.
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define SPIN_NS 50000
#define MOST_THREADS 256
#define APART __attribute__((aligned(128))) // on a cache line of its own

typedef struct pool pool;
typedef void job_function(pool *p, int thread, void *job);
struct pool {
  int threads;
  APART atomic_uint arrived;
  APART atomic_uint phase; // of barriers: grows by one at each
  APART atomic_uint run;   // of runs: grows by one at each
  atomic_int sleepers;
  job_function *function;
  void *job;
  pthread_mutex_t lock;
  pthread_cond_t news;
  pthread_t thread[MOST_THREADS];
  float *scratch[MOST_THREADS];
  size_t scratch_floats[MOST_THREADS];
  int stop;
};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}
static inline int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}
// Wait until *word is no longer `old`.
static void wait_change(pool *p, atomic_uint *word, unsigned old, int spin) {
  if (spin) {
    int64_t until = 0;
    for (int i = 1;; i++) {
      if (atomic_load_explicit(word, memory_order_acquire) != old) return;
      relax();
      if (i % 64 == 0) {
        int64_t now = now_ns();
        if (!until) until = now + SPIN_NS;
        if (now > until) break;
      }
    }
  }
  pthread_mutex_lock(&p->lock);
  atomic_fetch_add(&p->sleepers, 1);
  while (atomic_load(word) == old) pthread_cond_wait(&p->news, &p->lock);
  atomic_fetch_sub(&p->sleepers, 1);
  pthread_mutex_unlock(&p->lock);
}
static void change(pool *p, atomic_uint *word) {
  atomic_fetch_add(word, 1);
  if (atomic_load(&p->sleepers)) {
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->news);
    pthread_mutex_unlock(&p->lock);
  }
}
static void barrier(pool *p) {
  if (p->threads == 1) return;
  unsigned phase = atomic_load(&p->phase);
  if (atomic_fetch_add(&p->arrived, 1) + 1 == (unsigned)p->threads) {
    atomic_store(&p->arrived, 0);
    change(p, &p->phase);
  } else {
    wait_change(p, &p->phase, phase, 1);
  }
}

typedef struct {
  pool *p;
  int thread;
} place;
static void *pool_thread(void *at) {
  place here = *(place *)at;
  free(at);
  unsigned seen = 0;
  for (;;) {
    wait_change(here.p, &here.p->run, seen, 0);
    seen = atomic_load(&here.p->run);
    if (here.p->stop) return 0;
    here.p->function(here.p, here.thread, here.p->job);
    barrier(here.p);
  }
}
// Floats of a thread's own, kept between runs. 0 when there is no memory.
static float *scratch(pool *p, int thread, size_t floats) {
  if (p->scratch_floats[thread] < floats) {
    free(p->scratch[thread]);
    floats = (floats + 1023) / 1024 * 1024;
    p->scratch[thread] = aligned_alloc(128, floats * sizeof(float));
    p->scratch_floats[thread] = p->scratch[thread] ? floats : 0;
  }
  return p->scratch[thread];
}
// Run a function on all threads; returns when all are done.
static void pool_run(pool *p, job_function *function, void *job) {
  if (p->threads > 1) {
    p->function = function;
    p->job = job;
    change(p, &p->run);
  }
  function(p, 0, job);
  barrier(p);
}
