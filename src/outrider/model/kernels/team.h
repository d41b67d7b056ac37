/* A team of threads for the kernels: the caller and its helpers share out the units of one task at a time. */
#ifndef OUTRIDER_TEAM_H
#define OUTRIDER_TEAM_H

#define MOST_MEMBERS 256

/* Do units begin..end-1. No two members that run at once have the same number: it names a member's own scratch. */
typedef void Task(void *job, int member, int begin, int end);

/* Does all units with up to `threads` threads, the calling one among them, and returns when they are done. Who does
 * which unit differs from run to run: what a unit writes must not depend on it. */
void team_run(int threads, int units, Task *task, void *job);

#endif
