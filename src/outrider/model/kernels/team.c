/* Threads that share out work, and give their cores back when there is none or when a core is wanted elsewhere.
 *
 * A task is over when its units are done, not when every thread has come by: a thread that the system has put aside
 * holds up the others only by the few units in its hands. Three rules keep a busy machine from stopping everyone:
 *
 *   - units are claimed in small pieces, first those of one's own stretch (the same memory every time), then others';
 *   - whoever waits spins for a short while and then sleeps, so that the one it waits for can have its core;
 *   - when a helper was late, the caller works alone for a while before it tries again.
 *
 * The caller publishes a task by its epoch, even when the task can be read, odd while it is written. A stretch's cursor
 * holds the epoch it belongs to and the next unit; one of an older epoch stands for an untouched stretch. A claim is a
 * compare-and-swap of the cursor. It can succeed only while units of that epoch are undone, and until they are done the
 * caller neither returns nor publishes anything else: what a claim refers to is alive.
 *
 * OpenMP is not used because how long its threads spin cannot be set once another library has loaded it.
 */
#include "team.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define HELPER_SPIN 200000     /* ns that a helper looks out for the next task: longer than Python needs per layer */
#define CALLER_SPIN 50000      /* ns that the caller waits for a helper's last units, beyond its own time in the task */
#define SHORTEST_SOLO 5000000  /* ns that the caller works alone after a helper was late; four times that after the */
#define LONGEST_SOLO 640000000 /* next, up to this: a try beside a busy core costs a slice of the scheduler, some ms; */
#define FORGIVEN 20000000      /* the shortest again when nobody was late for so long */
#define PIECES 4               /* a claim is this fraction of what is left of a stretch */
#define LOOKS 32               /* between two readings of the clock */
#define UNIT_BITS 20           /* leaves 44 for the epoch: years of tasks before it could be taken for an older one */

typedef struct {
    _Alignas(64) _Atomic uint64_t at; /* epoch << UNIT_BITS | next unit */
} Cursor;

static struct {
    _Alignas(64) _Atomic uint64_t epoch;
    _Atomic int threads, units;
    _Atomic(Task *) task;
    _Atomic(void *) job;
    _Alignas(64) _Atomic uint32_t done; /* units */
    _Atomic int waiting;                /* whether the caller sleeps until they all are */
    _Alignas(64) _Atomic int sleeping;  /* helpers, */
    _Atomic uint32_t calls;             /* and how often they were woken */
    _Alignas(64) _Atomic int taken;     /* by a caller; what follows is that caller's */
    int helpers, ready;
    int64_t solo_until, solo, late;
} team;
static Cursor cursors[MOST_MEMBERS];

/* ---- waiting ------------------------------------------------------------------------------------------ */

static inline int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Sleeps unless the word has changed from `seen`; may return early. */
static void sleep_on(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
}

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, 0, 0, 0); }

static void renew_beds(void) {}
#else
static pthread_mutex_t door = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bell = PTHREAD_COND_INITIALIZER;

static void sleep_on(_Atomic uint32_t *word, uint32_t seen) {
    pthread_mutex_lock(&door);
    if (atomic_load(word) == seen) pthread_cond_wait(&bell, &door);
    pthread_mutex_unlock(&door);
}

static void wake(_Atomic uint32_t *word) {
    (void)word;
    pthread_mutex_lock(&door);
    pthread_cond_broadcast(&bell);
    pthread_mutex_unlock(&door);
}

static void renew_beds(void) {
    pthread_mutex_init(&door, 0);
    pthread_cond_init(&bell, 0);
}
#endif

/* ---- claiming ----------------------------------------------------------------------------------------- */

/* Where a member's stretch of the units begins; the next member's begin is its end. */
static inline int begin_of(int member, int units, int threads) { return (int)((int64_t)units * member / threads); }

/* Takes some units of a stretch; returns how many, 0 when there are none left of this epoch. */
static int claim(uint64_t epoch, int stretch, int units, int threads, int *begin) {
    int first = begin_of(stretch, units, threads), end = begin_of(stretch + 1, units, threads);
    uint64_t at = atomic_load_explicit(&cursors[stretch].at, memory_order_acquire);
    while (first < end) {
        uint64_t of = at >> UNIT_BITS;
        int next = of == epoch ? (int)(at & ((1 << UNIT_BITS) - 1)) : first;
        if (of > epoch || next >= end) break;
        int count = (end - next + PIECES - 1) / PIECES;
        uint64_t taken = epoch << UNIT_BITS | (uint64_t)(next + count);
        if (atomic_compare_exchange_weak_explicit(&cursors[stretch].at, &at, taken, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            *begin = next;
            return count;
        }
    }
    return 0;
}

/* Does what can be claimed, one's own stretch first; returns how many units that were. */
static int take_part(uint64_t epoch, int member, int units, int threads, Task *task, void *job) {
    int sum = 0;
    for (int i = 0; i < threads; i++) {
        int stretch = (member + i) % threads, begin, count;
        while ((count = claim(epoch, stretch, units, threads, &begin))) {
            task(job, member, begin, begin + count);
            sum += count;
        }
    }
    return sum;
}

/* ---- helpers ------------------------------------------------------------------------------------------ */

/* The next epoch whose task can be read: looked out for, then slept for. */
static uint64_t next_epoch(uint64_t seen) {
    for (;;) {
        int64_t begin = now();
        do {
            for (int i = 0; i < LOOKS; i++) {
                uint64_t epoch = atomic_load_explicit(&team.epoch, memory_order_acquire);
                if (epoch != seen && !(epoch & 1)) return epoch;
                relax();
            }
        } while (now() - begin < HELPER_SPIN);
        atomic_fetch_add(&team.sleeping, 1);
        uint32_t calls = atomic_load(&team.calls);
        if (atomic_load(&team.epoch) == seen) sleep_on(&team.calls, calls);
        atomic_fetch_sub(&team.sleeping, 1);
    }
}

static void *help(void *number) {
    int member = (int)(intptr_t)number;
    uint64_t epoch = 0;
    for (;;) {
        epoch = next_epoch(epoch);
        int units = atomic_load_explicit(&team.units, memory_order_relaxed);
        int threads = atomic_load_explicit(&team.threads, memory_order_relaxed);
        Task *task = atomic_load_explicit(&team.task, memory_order_relaxed);
        void *job = atomic_load_explicit(&team.job, memory_order_relaxed);
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&team.epoch, memory_order_relaxed) != epoch) continue; /* read half of each of two */
        if (member >= threads) continue;
        int did = take_part(epoch, member, units, threads, task, job);
        if (did && atomic_fetch_add(&team.done, did) + did == (uint32_t)units && atomic_load(&team.waiting))
            wake(&team.done);
    }
    return 0;
}

/* A child of fork has none of its parent's threads. */
static void forget_helpers(void) {
    team.helpers = 0;
    team.solo_until = 0;
    atomic_store(&team.epoch, (atomic_load(&team.epoch) + 1) & ~(uint64_t)1);
    atomic_store(&team.sleeping, 0);
    atomic_store(&team.waiting, 0);
    atomic_store(&team.taken, 0);
    renew_beds();
}

/* Helpers up to a number, as far as the system grants them; signals stay with the program's own threads. */
static void hire(int helpers) {
    if (!team.ready) pthread_atfork(0, 0, forget_helpers);
    team.ready = 1;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; team.helpers < helpers; team.helpers++) {
        if (pthread_create(&thread, 0, help, (void *)(intptr_t)(team.helpers + 1))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* ---- the caller --------------------------------------------------------------------------------------- */

static uint64_t publish(int threads, int units, Task *task, void *job) {
    uint64_t epoch = atomic_load_explicit(&team.epoch, memory_order_relaxed);
    atomic_store_explicit(&team.epoch, epoch + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&team.units, units, memory_order_relaxed);
    atomic_store_explicit(&team.threads, threads, memory_order_relaxed);
    atomic_store_explicit(&team.task, task, memory_order_relaxed);
    atomic_store_explicit(&team.job, job, memory_order_relaxed);
    atomic_store_explicit(&team.done, 0, memory_order_relaxed);
    atomic_store(&team.epoch, epoch + 2);
    if (atomic_load(&team.sleeping)) {
        atomic_fetch_add(&team.calls, 1);
        wake(&team.calls);
    }
    return epoch + 2;
}

/* Until all units are done. Longer than the caller's own work and some: a helper was put aside with units in hand. */
static void await(uint32_t units, int64_t begin) {
    if (atomic_load_explicit(&team.done, memory_order_acquire) == units) return;
    int64_t idle = now(), t = idle, patience = idle - begin + CALLER_SPIN;
    do {
        for (int i = 0; i < LOOKS; i++) {
            if (atomic_load_explicit(&team.done, memory_order_acquire) == units) return;
            relax();
        }
        t = now();
    } while (t - idle < patience);
    atomic_store(&team.waiting, 1);
    for (uint32_t done; (done = atomic_load(&team.done)) != units;) sleep_on(&team.done, done);
    atomic_store(&team.waiting, 0);
    t = now();
    int again = t - team.late < FORGIVEN + team.solo;
    team.solo = !again ? SHORTEST_SOLO : team.solo * 4 < LONGEST_SOLO ? team.solo * 4 : LONGEST_SOLO;
    team.late = t;
    team.solo_until = t + team.solo;
}

void team_run(int threads, int units, Task *task, void *job) {
    threads = threads < MOST_MEMBERS ? threads : MOST_MEMBERS;
    int64_t begin;
    if (threads < 2 || units < 2 || units >> UNIT_BITS || atomic_exchange_explicit(&team.taken, 1, memory_order_acquire)) {
        task(job, 0, 0, units); /* nothing to share out, or another caller has the helpers */
        return;
    }
    if (team.helpers < threads - 1) hire(threads - 1);
    if ((begin = now()) < team.solo_until) {
        atomic_store_explicit(&team.taken, 0, memory_order_release);
        task(job, 0, 0, units);
        return;
    }
    uint64_t epoch = publish(threads, units, task, job);
    uint32_t did = take_part(epoch, 0, units, threads, task, job);
    atomic_fetch_add(&team.done, did);
    await(units, begin);
    atomic_store_explicit(&team.taken, 0, memory_order_release);
}
