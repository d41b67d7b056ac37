/* A pool of threads that share the units of a task, and sleep when there is no work or when a core is busy elsewhere.
 *
 * A task ends when its units are done, not when every thread has arrived: a descheduled thread delays the others only
 * by the few units it holds. Three rules keep a busy machine from stopping all threads:
 *
 *   - units are claimed in small pieces, first those of the thread's own range (the same memory every time);
 *   - a waiting thread spins for a short while and then sleeps, so that the thread it waits for can use its core;
 *   - a helper that was late is left out for a while, because another program uses its core.
 *
 * The caller publishes a task by its epoch, even when the task can be read, odd while it is written. A range's cursor
 * holds the epoch it belongs to and the next unit; one of an older epoch stands for an untouched range. A claim is a
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
#define SHORTEST_REST 5000000  /* ns that a helper is left out after it was late; four times that after the next, */
#define LONGEST_REST 640000000 /* up to this: a try beside a busy core costs a slice of the scheduler, some ms; */
#define FORGIVEN 20000000      /* the shortest again when it was not late for so long */
#define PIECES 4               /* a claim is this fraction of what is left of a range */
#define LOOKS 32               /* between two readings of the clock */
#define UNIT_BITS 20           /* leaves 44 for the epoch: years of tasks before it could be taken for an older one */

typedef struct {
    _Alignas(64) _Atomic uint64_t at; /* epoch << UNIT_BITS | next unit */
} Cursor;

typedef struct {
    _Alignas(64) _Atomic uint64_t holds; /* the epoch whose units it may have in its hands, or 0 */
    _Alignas(64) _Atomic uint32_t resting;
    int64_t until, rest, late; /* the caller's: when it may be tried again, how long that was, when it was late */
} Helper;

static struct {
    _Alignas(64) _Atomic uint64_t epoch;
    _Atomic int threads, units;
    _Atomic(Task *) task;
    _Atomic(void *) job;
    _Alignas(64) _Atomic uint32_t done; /* units */
    _Atomic int waiting;                /* whether the caller sleeps until they all are */
    _Alignas(64) _Atomic int sleeping;  /* helpers, */
    _Atomic uint32_t calls;             /* and how often they were woken */
    _Atomic uint32_t wider;             /* how often a task had more threads than the one before it */
    _Alignas(64) _Atomic int taken;     /* by a caller; what follows is that caller's */
    int helpers, ready, resting;
    int64_t soonest; /* when one of those that rest may be tried again */
} team;
static Cursor cursors[MOST_MEMBERS];
static Helper helpers[MOST_MEMBERS]; /* by member; the caller is 0 */

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
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bell = PTHREAD_COND_INITIALIZER;

static void sleep_on(_Atomic uint32_t *word, uint32_t seen) {
    pthread_mutex_lock(&mutex);
    if (atomic_load(word) == seen) pthread_cond_wait(&bell, &mutex);
    pthread_mutex_unlock(&mutex);
}

static void wake(_Atomic uint32_t *word) {
    (void)word;
    pthread_mutex_lock(&mutex);
    pthread_cond_broadcast(&bell);
    pthread_mutex_unlock(&mutex);
}

static void renew_beds(void) {
    pthread_mutex_init(&mutex, 0);
    pthread_cond_init(&bell, 0);
}
#endif

/* ---- claiming ----------------------------------------------------------------------------------------- */

/* Where a member's range of the units begins; the next member's begin is its end. */
static inline int begin_of(int member, int units, int threads) { return (int)((int64_t)units * member / threads); }

/* Takes some units of a range; returns how many, 0 when there are none left of this epoch. */
static int claim(uint64_t epoch, int range, int units, int threads, int *begin) {
    int first = begin_of(range, units, threads), end = begin_of(range + 1, units, threads);
    uint64_t at = atomic_load_explicit(&cursors[range].at, memory_order_acquire);
    while (first < end) {
        uint64_t of = at >> UNIT_BITS;
        int next = of == epoch ? (int)(at & ((1 << UNIT_BITS) - 1)) : first;
        if (of > epoch || next >= end) break;
        int count = (end - next + PIECES - 1) / PIECES;
        uint64_t taken = epoch << UNIT_BITS | (uint64_t)(next + count);
        if (atomic_compare_exchange_weak_explicit(&cursors[range].at, &at, taken, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            *begin = next;
            return count;
        }
    }
    return 0;
}

/* Does what can be claimed, the member's own range first; returns the number of units. */
static int take_part(uint64_t epoch, int member, int units, int threads, Task *task, void *job) {
    int sum = 0;
    for (int i = 0; i < threads; i++) {
        int range = (member + i) % threads, begin, count;
        while ((count = claim(epoch, range, units, threads, &begin))) {
            task(job, member, begin, begin + count);
            sum += count;
        }
    }
    return sum;
}

/* ---- helpers ------------------------------------------------------------------------------------------ */

/* Waits for a task with enough threads to include this member: smaller tasks do not wake it. */
static void sleep_until_wider(int member) {
    for (;;) {
        uint32_t wider = atomic_load(&team.wider);
        if (member < atomic_load(&team.threads)) return;
        sleep_on(&team.wider, wider);
    }
}

/* The next epoch whose task can be read: looked out for, then slept for. */
static uint64_t next_epoch(uint64_t seen, int member) {
    for (;;) {
        int64_t begin = now();
        do {
            for (int i = 0; i < LOOKS; i++) {
                uint64_t epoch = atomic_load_explicit(&team.epoch, memory_order_acquire);
                if (epoch != seen && !(epoch & 1)) return epoch;
                relax();
            }
        } while (now() - begin < HELPER_SPIN);
        if (member >= atomic_load(&team.threads)) {
            sleep_until_wider(member);
            continue;
        }
        atomic_fetch_add(&team.sleeping, 1);
        uint32_t calls = atomic_load(&team.calls);
        if (atomic_load(&team.epoch) == seen) sleep_on(&team.calls, calls);
        atomic_fetch_sub(&team.sleeping, 1);
    }
}

static void *help(void *number) {
    int member = (int)(intptr_t)number;
    Helper *me = &helpers[member];
    uint64_t epoch = 0;
    for (;;) {
        while (atomic_load(&me->resting)) sleep_on(&me->resting, 1);
        epoch = next_epoch(epoch, member);
        int units = atomic_load_explicit(&team.units, memory_order_relaxed);
        int threads = atomic_load_explicit(&team.threads, memory_order_relaxed);
        Task *task = atomic_load_explicit(&team.task, memory_order_relaxed);
        void *job = atomic_load_explicit(&team.job, memory_order_relaxed);
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&team.epoch, memory_order_relaxed) != epoch) continue; /* read half of each of two */
        if (member >= threads || atomic_load_explicit(&me->resting, memory_order_relaxed)) continue;
        atomic_store_explicit(&me->holds, epoch, memory_order_relaxed);
        int did = take_part(epoch, member, units, threads, task, job);
        if (did && atomic_fetch_add(&team.done, did) + did == (uint32_t)units && atomic_load(&team.waiting))
            wake(&team.done);
        atomic_store_explicit(&me->holds, 0, memory_order_relaxed);
    }
    return 0;
}

/* A child of fork has none of its parent's threads. */
static void forget_helpers(void) {
    team.helpers = team.resting = 0;
    for (int i = 0; i < MOST_MEMBERS; i++) helpers[i] = (Helper){0};
    atomic_store(&team.epoch, (atomic_load(&team.epoch) + 1) & ~(uint64_t)1);
    atomic_store(&team.sleeping, 0);
    atomic_store(&team.waiting, 0);
    atomic_store(&team.taken, 0);
    renew_beds();
}

/* Helpers up to a number, as far as the system grants them; signals stay with the program's own threads. */
static void hire(int count) {
#if !defined(_WIN32) /* which has neither fork nor signals of this kind */
    if (!team.ready) pthread_atfork(0, 0, forget_helpers);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    team.ready = 1;
    for (pthread_t thread; team.helpers < count; team.helpers++) {
        if (pthread_create(&thread, 0, help, (void *)(intptr_t)(team.helpers + 1))) break;
        pthread_detach(thread);
    }
#if !defined(_WIN32)
    pthread_sigmask(SIG_SETMASK, &before, 0);
#endif
}

/* ---- the caller --------------------------------------------------------------------------------------- */

static uint64_t publish(int threads, int units, Task *task, void *job) {
    uint64_t epoch = atomic_load_explicit(&team.epoch, memory_order_relaxed);
    int before = atomic_load_explicit(&team.threads, memory_order_relaxed);
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
    if (threads > before) {
        atomic_fetch_add(&team.wider, 1);
        wake(&team.wider);
    }
    return epoch + 2;
}

/* Leaves out those who may hold units of this epoch. */
static void send_to_rest(uint64_t epoch, int threads, int64_t t) {
    for (int i = 1; i < threads; i++) {
        Helper *h = &helpers[i];
        if (atomic_load_explicit(&h->holds, memory_order_relaxed) != epoch) continue;
        int again = t - h->late < FORGIVEN + h->rest;
        h->rest = !again ? SHORTEST_REST : h->rest * 4 < LONGEST_REST ? h->rest * 4 : LONGEST_REST;
        h->late = t;
        h->until = t + h->rest;
        if (!team.resting++ || h->until < team.soonest) team.soonest = h->until;
        atomic_store(&h->resting, 1);
    }
}

static void call_rested(int64_t t) {
    int64_t soonest = INT64_MAX;
    for (int i = 1; i <= team.helpers; i++) {
        Helper *h = &helpers[i];
        if (!atomic_load_explicit(&h->resting, memory_order_relaxed)) continue;
        if (h->until > t) {
            soonest = h->until < soonest ? h->until : soonest;
            continue;
        }
        team.resting--;
        atomic_store(&h->resting, 0);
        wake(&h->resting);
    }
    team.soonest = soonest;
}

/* Until all units are done. Longer than the caller's own work and some: a helper was put aside with units in hand. */
static void await(uint64_t epoch, int threads, uint32_t units, int64_t begin) {
    if (atomic_load_explicit(&team.done, memory_order_acquire) == units) return;
    int64_t idle = now(), t = idle, patience = idle - begin + CALLER_SPIN;
    do {
        for (int i = 0; i < LOOKS; i++) {
            if (atomic_load_explicit(&team.done, memory_order_acquire) == units) return;
            relax();
        }
        t = now();
    } while (t - idle < patience);
    send_to_rest(epoch, threads, t);
    atomic_store(&team.waiting, 1);
    for (uint32_t done; (done = atomic_load(&team.done)) != units;) sleep_on(&team.done, done);
    atomic_store(&team.waiting, 0);
}

void team_run(int threads, int units, Task *task, void *job) {
    threads = threads < MOST_MEMBERS ? threads : MOST_MEMBERS;
    if (threads < 2 || units < 2 || units >> UNIT_BITS || atomic_exchange_explicit(&team.taken, 1, memory_order_acquire)) {
        task(job, 0, 0, units); /* nothing to share out, or another caller has the helpers */
        return;
    }
    if (team.helpers < threads - 1) hire(threads - 1);
    int64_t begin = now();
    if (team.resting && begin >= team.soonest) call_rested(begin);
    if (team.resting >= threads - 1) {
        atomic_store_explicit(&team.taken, 0, memory_order_release);
        task(job, 0, 0, units);
        return;
    }
    uint64_t epoch = publish(threads, units, task, job);
    uint32_t did = take_part(epoch, 0, units, threads, task, job);
    atomic_fetch_add(&team.done, did);
    await(epoch, threads, units, begin);
    atomic_store_explicit(&team.taken, 0, memory_order_release);
}
