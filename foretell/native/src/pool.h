/* One team of threads for the whole process. A job is one function that all of them run, with
   barriers inside and tasks that are taken as threads get to them. */

#ifndef FT_POOL_H
#define FT_POOL_H

#include <stdint.h>

#define MOST_THREADS 256

typedef struct ft_team ft_team;
typedef void (*ft_work)(ft_team *team, int thread, void *argument);

/* Runs `work` on `threads` threads, the caller being thread 0. One job runs at a time. */
void ft_run(ft_work work, void *argument, int threads);
int ft_team_size(const ft_team *team);
/* All threads get here before one goes on; tasks are counted from 0 again. */
void ft_barrier(ft_team *team);
/* The number of the next of `total` tasks, each given out once; `total` or more: there is none.
   Each thread has a share of neighbours, in order, and then helps the others. */
int32_t ft_next(ft_team *team, int thread, int32_t total);

#endif
