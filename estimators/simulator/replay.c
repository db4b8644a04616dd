/* The machine of machine.py and the replay of incremental.py with bitwise equal results, at 30 times their speed.

   machine.py and incremental.py describe the rules and why a replay is exact; names are the same here. The contention
   of a combination of work is computed by Python once (`Ask`) and then cached. Nodes are positions in the original
   schedule. A collective waits in its queue while its index there is at least `begun`, and runs while `running` is its
   node. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum Step { NOTHING, COMPUTE, WAIT, START, COMM };

/* Adding and subtracting this rounds a float to a multiple of 2^-10 ns; see machine.py. */
#define ROUNDER 6597069766656.0
static inline double on_grid(double ns) { return (ns + ROUNDER) - ROUNDER; }
static inline double most(double a, double b) { return a > b ? a : b; }
static inline double least(double a, double b) { return a < b ? a : b; }

/* Writes the slowdown factors of compute and of each running collective. Where Python fails (Ctrl-C, say) it writes ones:
   the caller in Python then raises that error in place of using the result. */
typedef void (*Ask)(int load, int count, const int *traffic, double *stretches);

/* The slowdown factors of collectives that run together, and of each load beside them. */
typedef struct Mixes {
  struct Mixes *next;
  int count;
  int *traffic;
  double **by_load; /* [load + 1], NULL until computed: factor of compute, then of each collective */
} Mixes;

#define BUCKETS 1024

typedef struct {
  /* The schedule. */
  int nodes, queues, loads;
  const int *step, *load, *traffic, *queue, *waits_for;
  const double *ns;
  double launch_ns, gap_ns;
  int synchronous, held;
  Ask ask;
  Mixes *known[BUCKETS];
  /* The state of a replay. */
  double now, host, idle, exposed, most_ahead;
  int queued;
  int *running, *issued, *begun;       /* by queue */
  double *left;                        /* likewise */
  int **issue;                         /* by queue: its collectives in the order issued */
  double **not_before;                 /* earliest start of each of them */
  char *in_flight;                     /* by node */
  int active_count, *active, *mixing;  /* queues that run a collective, and the traffic of these collectives */
  Mixes *mixes;
  /* Results, by node. */
  double *start, *end, *exposed_by;
} Machine;

/* --- mixes */

static void set_active(Machine *m) {
  int count = 0;
  unsigned hash = 0;
  for (int q = 0; q < m->queues; q++)
    if (m->running[q] >= 0) {
      m->active[count] = q;
      m->mixing[count] = m->traffic[m->running[q]];
      hash = hash * 31 + (unsigned)m->mixing[count++] + 1;
    }
  m->active_count = count;
  Mixes **place = &m->known[hash % BUCKETS];
  size_t size = count * sizeof(int);
  for (Mixes *each = *place; each; each = each->next)
    if (each->count == count && !memcmp(each->traffic, m->mixing, size)) {
      m->mixes = each;
      return;
    }
  Mixes *made = calloc(1, sizeof *made);
  made->next = *place;
  made->count = count;
  made->traffic = memcpy(malloc(size + 1), m->mixing, size);
  made->by_load = calloc(m->loads + 1, sizeof(double *));
  *place = m->mixes = made;
}

/* Return the slowdown factors of compute, then of each running collective. load: -1 for an idle compute stream. */
static inline const double *mix(Machine *m, int load) {
  double *found = m->mixes->by_load[load + 1];
  if (!found) {
    found = m->mixes->by_load[load + 1] = malloc((m->active_count + 1) * sizeof(double));
    m->ask(load, m->active_count, m->mixing, found);
  }
  return found;
}

/* --- the machine */

static void begin(Machine *m) {
  if (!m->queued) return;
  if (m->active_count == 1 && m->queued == m->issued[m->active[0]] - m->begun[m->active[0]]) return;
  int changed = 0;
  for (int q = 0; q < m->queues; q++) {
    if (m->begun[q] == m->issued[q] || m->running[q] >= 0 || m->not_before[q][m->begun[q]] > m->now) continue;
    int at = m->issue[q][m->begun[q]++];
    m->queued--;
    m->running[q] = at;
    m->left[q] = m->ns[at];
    m->start[at] = m->now;
    changed = 1;
  }
  if (changed) set_active(m);
}

/* Return the time at which the first running collective ends or, if `begins`, another one begins. */
static double next_change(Machine *m, const double *stretches, int begins) {
  double takes_ns = INFINITY;
  for (int i = 0; i < m->active_count; i++) takes_ns = least(takes_ns, m->left[m->active[i]] * stretches[i]);
  double until = m->now + on_grid(takes_ns);
  if (begins && m->queued)
    for (int q = 0; q < m->queues; q++)
      if (m->begun[q] < m->issued[q] && m->running[q] < 0)
        until = least(until, most(m->now, m->not_before[q][m->begun[q]]));
  return until;
}

/* Move the clock to `until`, before which none of the running collectives ends. */
static void advance(Machine *m, double until, const double *stretches) {
  double span = until - m->now;
  int done = 0;
  for (int i = 0; i < m->active_count; i++) {
    int q = m->active[i];
    if (m->now + on_grid(m->left[q] * stretches[i]) <= until) {
      int at = m->running[q];
      m->end[at] = until;
      m->running[q] = -1;
      m->in_flight[at] = 0;
      done = 1;
    } else {
      m->left[q] -= on_grid(span / stretches[i]);
    }
  }
  m->now = until;
  if (done) set_active(m);
}

/* Leave the compute stream idle up to `until`; no collective begins meanwhile. */
static void pass(Machine *m, double until) {
  m->idle += until - m->now;
  while (m->active_count && m->now < until) {
    const double *stretches = mix(m, -1) + 1;
    advance(m, least(until, next_change(m, stretches, 0)), stretches);
  }
  m->now = until;
}

static void stand_until_host(Machine *m) {
  while (m->now < m->host) {
    begin(m);
    const double *stretches = mix(m, -1) + 1;
    double until = least(m->host, next_change(m, stretches, 1));
    m->idle += until - m->now;
    advance(m, until, stretches);
  }
}

static void stand_until_done(Machine *m, int collective) {
  int queue = m->queue[collective];
  while (m->in_flight[collective]) {
    begin(m);
    const double *stretches = mix(m, -1) + 1;
    double until = next_change(m, stretches, 1);
    int head = m->running[queue];
    if (head < 0) {
      m->idle += until - m->now;
    } else if (until > m->now) {
      m->exposed += until - m->now;
      m->exposed_by[head] += until - m->now;
    }
    advance(m, until, stretches);
    begin(m);
  }
}

/* Simulate a kernel beside the only running collective. Return 0 without changes if that one ends meanwhile, or if
   another one may begin. */
static int computes_beside_one(Machine *m, int at) {
  int queue = m->active[0];
  double left_ns = m->left[queue], gap_end = m->now + m->gap_ns, begins = m->now;
  int others = m->queued != m->issued[queue] - m->begun[queue];
  if (m->queued && others && (m->host > gap_end || !m->held)) return 0;
  double untils[] = {gap_end, m->host};
  for (int i = 0; i < 2; i++) {
    double until = untils[i];
    if (until <= begins) continue;
    double stretch = mix(m, -1)[1];
    if (on_grid(left_ns * stretch) <= until - begins) return 0;
    left_ns -= on_grid((until - begins) / stretch);
    begins = until;
  }
  const double *found = mix(m, m->load[at]);
  double takes_ns = on_grid(m->ns[at] * found[0]);
  if (on_grid(left_ns * found[1]) <= takes_ns) return 0;
  m->left[queue] = left_ns - on_grid(takes_ns / found[1]);
  m->idle += begins - m->now;
  m->most_ahead = most(m->most_ahead, m->host - gap_end);
  m->start[at] = begins;
  m->end[at] = m->now = begins + takes_ns;
  if (m->queued && takes_ns) begin(m);
  return 1;
}

/* Simulate compute of `left_ns` (without contention) beside the collectives in the queues. */
static void compute(Machine *m, double left_ns, int load) {
  int begins = !m->held;
  if (begins) begin(m);
  while (left_ns > 0) {
    const double *found = mix(m, load);
    double slow = found[0], until = next_change(m, found + 1, begins);
    double end = m->now + (slow == 1.0 ? left_ns : on_grid(left_ns * slow));
    if (end <= until) {
      left_ns = 0;
      until = end;
    } else {
      left_ns -= on_grid((until - m->now) / slow);
    }
    advance(m, until, found + 1);
    if (begins || left_ns <= 0) begin(m);
  }
}

static void enqueue(Machine *m, int at) {
  m->most_ahead = most(m->most_ahead, m->host - m->now);
  int queue = m->queue[at], place = m->issued[queue]++;
  m->issue[queue][place] = at;
  m->not_before[queue][place] = most(m->now, m->host);
  m->queued++;
  m->in_flight[at] = 1;
}

static void run(Machine *m, const int *nodes, int count) {
  for (int i = 0; i < count; i++) {
    int at = nodes[i];
    switch (m->step[at]) {
    case COMPUTE:
      m->host += m->launch_ns;
      if (m->active_count == 1 && computes_beside_one(m, at)) break;
      if (m->gap_ns) pass(m, m->now + m->gap_ns);
      double ahead = m->host - m->now;
      m->most_ahead = most(m->most_ahead, ahead);
      if (ahead > 0) {
        if (m->active_count || m->queued) {
          stand_until_host(m);
        } else {
          m->idle += ahead;
          m->now = m->host;
        }
      }
      m->start[at] = m->now;
      if (m->active_count || (m->queued && !m->held)) {
        compute(m, m->ns[at], m->load[at]);
      } else {
        m->now += m->ns[at];
        if (m->queued && m->ns[at]) begin(m);
      }
      m->end[at] = m->now;
      break;
    case NOTHING:
      m->start[at] = m->end[at] = m->now;
      break;
    case WAIT:
      m->start[at] = m->now;
      if (m->in_flight[m->waits_for[at]]) stand_until_done(m, m->waits_for[at]);
      m->end[at] = m->now;
      break;
    case START:
      m->host += m->launch_ns;
      enqueue(m, at);
      break;
    case COMM:
      m->host += m->launch_ns;
      pass(m, m->now + m->gap_ns);
      m->most_ahead = most(m->most_ahead, m->host - m->now);
      stand_until_host(m);
      enqueue(m, at);
      stand_until_done(m, at);
    }
    if (m->synchronous && m->now > m->host) m->host = m->now;
  }
}

/* Run all collectives to their end, because starts without a wait still end before the step does. */
static void finish(Machine *m) {
  for (int q = 0; q < m->queues; q++) {
    int last = m->begun[q] < m->issued[q] ? m->issue[q][m->issued[q] - 1] : m->running[q];
    if (last >= 0) stand_until_done(m, last);
  }
}

/* --- replays */

/* The simulation of a block of nodes, and the state of the machine before it, with times relative to its clock. */
typedef struct {
  double took_ns, idle_ns, exposed_ns;
  double ahead_ns, most_ahead_ns; /* lead of the host's clock; not part of the state */
  int *issued, *begun, *late;     /* by queue; late: number of the last collectives that the host has not issued yet */
  double *left_ns;                /* by queue; -1: no collective runs */
  double *late_ns;                /* time until the late ones are issued, one queue after the other */
  int late_count, late_room;
} Block;

typedef struct {
  double step_ns, exposed_ns, idle_ns;
  long blocks_replayed;
} Totals;

typedef struct {
  Machine m;
  int length, count;    /* nodes of a block, blocks */
  int *order, *place;   /* place: index of a collective in its queue */
  int **issue;          /* as `Machine.issue`, for the present order */
  Block *blocks, *tried; /* of the present order; of the trial, for the blocks that `changed` lists */
  int *changed, changes;
  int low, high, *window, tried_window; /* the trial; tried_window: whether `trial` is its result */
  int *nodes;
  Totals now, trial;
} Replay;

static void note_state(Machine *m, Block *b) {
  b->late_count = 0;
  for (int q = 0; q < m->queues; q++) {
    b->issued[q] = m->issued[q];
    b->begun[q] = m->begun[q];
    b->left_ns[q] = m->running[q] < 0 ? -1.0 : m->left[q];
    int first = m->issued[q];
    while (first > m->begun[q] && m->not_before[q][first - 1] > m->now) first--;
    b->late[q] = m->issued[q] - first;
    if (b->late_count + b->late[q] > b->late_room) {
      b->late_room = 2 * (b->late_count + b->late[q]);
      b->late_ns = realloc(b->late_ns, b->late_room * sizeof(double));
    }
    for (int i = first; i < m->issued[q]; i++) b->late_ns[b->late_count++] = m->not_before[q][i] - m->now;
  }
}

static int is_as_before(Replay *r, int number) {
  Machine *m = &r->m;
  Block *before = &r->blocks[number];
  if (m->synchronous && m->host - m->now != before->ahead_ns) return 0;
  const double *late_ns = before->late_ns;
  for (int q = 0; q < m->queues; q++) {
    int runs = m->running[q] >= 0, issued = m->issued[q], begun = m->begun[q], late = before->late[q];
    if (issued != before->issued[q] || begun != before->begun[q]) return 0;
    if ((runs ? m->left[q] : -1.0) != before->left_ns[q]) return 0;
    if (issued - late > begun && m->not_before[q][issued - late - 1] > m->now) return 0;
    for (int i = issued - late; i < issued; i++)
      if (m->not_before[q][i] - m->now != *late_ns++) return 0;
    int flying = begun - runs;
    if (memcmp(m->issue[q] + flying, r->issue[q] + flying, (issued - flying) * sizeof(int))) return 0;
  }
  return 1;
}

static void land(Machine *m) {
  for (int q = 0; q < m->queues; q++)
    for (int i = m->begun[q] - (m->running[q] >= 0); i < m->issued[q]; i++) m->in_flight[m->issue[q][i]] = 0;
}

/* Set the machine to the state before a block that begins `shift_ns` later than in the present order. */
static void resume(Replay *r, int number, double shift_ns) {
  Machine *m = &r->m;
  Block *b = &r->blocks[number];
  const double *late_ns = b->late_ns;
  m->now = 0;
  m->host = b->ahead_ns - (m->synchronous ? 0 : shift_ns);
  m->queued = 0;
  for (int q = 0; q < m->queues; q++) {
    int runs = b->left_ns[q] >= 0, begun = m->begun[q] = b->begun[q], issued = m->issued[q] = b->issued[q];
    m->left[q] = runs ? b->left_ns[q] : 0;
    m->running[q] = runs ? r->issue[q][begun - 1] : -1;
    for (int i = begun - runs; i < issued; i++) {
      m->issue[q][i] = r->issue[q][i];
      m->not_before[q][i] = i < issued - b->late[q] ? 0 : *late_ns++;
      m->in_flight[m->issue[q][i]] = 1;
    }
    m->queued += issued - begun;
  }
  set_active(m);
}

/* Simulate a block in the order of the trial. */
static void run_block(Replay *r, int number) {
  Machine *m = &r->m;
  Block *b = &r->tried[number];
  int from = number * r->length, to = from + r->length < m->nodes ? from + r->length : m->nodes;
  for (int at = from; at < to; at++)
    r->nodes[at - from] = r->low <= at && at < r->high ? r->window[at - r->low] : r->order[at];
  note_state(m, b);
  double began_ns = m->now;
  b->ahead_ns = m->host - m->now;
  m->idle = m->exposed = 0;
  m->most_ahead = -INFINITY;
  run(m, r->nodes, to - from);
  if (number == r->count - 1) finish(m);
  b->took_ns = m->now - began_ns;
  b->idle_ns = m->idle;
  b->exposed_ns = m->exposed;
  b->most_ahead_ns = m->most_ahead;
  r->changed[r->changes++] = number;
  r->now.blocks_replayed++;
}

/* Return the first block from `number` on in which the host was ahead, or is if it begins `shift_ns` later. */
static int host_matters(Replay *r, int number, double shift_ns) {
  if (r->m.synchronous || !shift_ns) return r->count;
  double enough_ns = least(0, shift_ns);
  while (number < r->count && r->blocks[number].most_ahead_ns <= enough_ns) number++;
  return number;
}

/* Return the totals if the nodes at positions low.. were in the order `window`. */
const Totals *replay_try(Replay *r, int low, const int *window, int length) {
  Machine *m = &r->m;
  if (r->tried_window && low == r->low && low + length == r->high && !memcmp(r->window, window, length * sizeof(int)))
    return &r->trial;
  r->tried_window = 1;
  r->trial = r->now;
  r->low = low;
  r->high = low + length;
  memcpy(r->window, window, length * sizeof(int));
  r->changes = 0;
  double shift_ns = 0;
  int number = low / r->length;
  if (number < r->count && length) resume(r, number, 0);
  while (number < r->count && length) {
    run_block(r, number);
    Block *made = &r->tried[number], *old = &r->blocks[number];
    shift_ns += made->took_ns - old->took_ns;
    r->trial.idle_ns += made->idle_ns - old->idle_ns;
    r->trial.exposed_ns += made->exposed_ns - old->exposed_ns;
    number++;
    if (number < r->count && number * r->length >= r->high && is_as_before(r, number)) {
      int following = host_matters(r, number, shift_ns);
      if (following != number) {
        land(m);
        number = following;
        if (number < r->count) resume(r, number, shift_ns);
      }
    }
  }
  land(m);
  r->trial.step_ns += shift_ns;
  r->trial.blocks_replayed = r->now.blocks_replayed;
  return &r->trial;
}

/* Make the order that was tried last the present order. */
const Totals *replay_apply(Replay *r) {
  Machine *m = &r->m;
  int free[m->queues];
  for (int q = 0; q < m->queues; q++) free[q] = m->nodes;
  for (int i = 0; i < r->high - r->low; i++) {
    int at = r->window[i], queue = m->queue[at];
    r->order[r->low + i] = at;
    if (r->place[at] >= 0 && r->place[at] < free[queue]) free[queue] = r->place[at];
  }
  for (int i = 0; i < r->high - r->low; i++) {
    int at = r->window[i];
    if (r->place[at] < 0) continue;
    r->place[at] = free[m->queue[at]]++;
    r->issue[m->queue[at]][r->place[at]] = at;
  }
  double shift_ns = 0;
  int change = 0;
  for (int number = r->changes ? r->changed[0] : r->count; number < r->count; number++) {
    if (change < r->changes && r->changed[change] == number) {
      Block old = r->blocks[number];
      r->blocks[number] = r->tried[number];
      r->tried[number] = old;
      shift_ns += r->blocks[number].took_ns - old.took_ns;
      change++;
    } else if (!m->synchronous) { /* the block is shifted in time, but the host's times are not */
      r->blocks[number].ahead_ns -= shift_ns;
      r->blocks[number].most_ahead_ns -= shift_ns;
    }
  }
  long replayed = r->now.blocks_replayed;
  r->now = r->trial;
  r->now.blocks_replayed = replayed;
  r->changes = r->tried_window = 0;
  return &r->now;
}

/* --- allocation */

static void machine_init(Machine *m, int nodes, int queues, int loads, const int *facts, const double *ns,
                         const double *profile, Ask ask) {
  m->nodes = nodes;
  m->queues = queues;
  m->loads = loads;
  const int **fields[] = {&m->step, &m->load, &m->traffic, &m->queue, &m->waits_for};
  for (int i = 0; i < 5; i++) *fields[i] = facts + (size_t)i * nodes;
  m->ns = ns;
  m->launch_ns = profile[0];
  m->gap_ns = profile[1];
  m->synchronous = profile[2] != 0;
  m->held = profile[3] != 0;
  m->ask = ask;
  int *by_queue = calloc(5 * (size_t)queues, sizeof(int));
  m->running = by_queue;
  m->issued = by_queue + queues;
  m->begun = by_queue + 2 * queues;
  m->active = by_queue + 3 * queues;
  m->mixing = by_queue + 4 * queues;
  m->left = calloc(queues, sizeof(double));
  m->issue = calloc(queues, sizeof(int *));
  m->not_before = calloc(queues, sizeof(double *));
  m->in_flight = calloc(nodes + 1, 1);
  int *counts = m->mixing; /* unused until a collective runs */
  for (int at = 0; at < nodes; at++) counts[m->queue[at]] += m->step[at] == START || m->step[at] == COMM;
  for (int q = 0; q < queues; q++) {
    m->running[q] = -1;
    m->issue[q] = malloc((counts[q] + 1) * sizeof(int));
    m->not_before[q] = malloc((counts[q] + 1) * sizeof(double));
  }
  m->most_ahead = -INFINITY;
  set_active(m);
}

static void machine_free(Machine *m) {
  for (int i = 0; i < BUCKETS; i++)
    for (Mixes *each = m->known[i], *next; each; each = next) {
      next = each->next;
      for (int load = 0; load <= m->loads; load++) free(each->by_load[load]);
      free(each->by_load);
      free(each->traffic);
      free(each);
    }
  for (int q = 0; q < m->queues; q++) {
    free(m->issue[q]);
    free(m->not_before[q]);
  }
  free(m->running);
  free(m->left);
  free(m->issue);
  free(m->not_before);
  free(m->in_flight);
}

/* Simulate all nodes in their order. times: start, end and exposed time of each node, then the step time and its idle
   time. */
void simulate(int nodes, int queues, int loads, const int *facts, const double *ns, const double *profile, Ask ask,
              double *times) {
  Machine m = {0};
  machine_init(&m, nodes, queues, loads, facts, ns, profile, ask);
  m.start = times;
  m.end = times + nodes;
  m.exposed_by = times + 2 * (size_t)nodes;
  int *order = malloc((nodes + 1) * sizeof(int));
  for (int at = 0; at < nodes; at++) order[at] = at;
  run(&m, order, nodes);
  finish(&m);
  free(order);
  times[3 * (size_t)nodes] = m.now;
  times[3 * (size_t)nodes + 1] = m.idle;
  machine_free(&m);
}

static Block *new_blocks(int count, int queues) {
  Block *blocks = calloc(count, sizeof *blocks);
  for (int i = 0; i < count; i++) {
    blocks[i].issued = calloc(3 * (size_t)queues, sizeof(int));
    blocks[i].begun = blocks[i].issued + queues;
    blocks[i].late = blocks[i].issued + 2 * queues;
    blocks[i].left_ns = calloc(queues, sizeof(double));
  }
  return blocks;
}

static void free_blocks(Block *blocks, int count) {
  for (int i = 0; i < count; i++) {
    free(blocks[i].issued);
    free(blocks[i].left_ns);
    free(blocks[i].late_ns);
  }
  free(blocks);
}

Replay *replay_new(int nodes, int queues, int loads, const int *facts, const double *ns, const double *profile,
                   Ask ask, int length) {
  Replay *r = calloc(1, sizeof *r);
  Machine *m = &r->m;
  machine_init(m, nodes, queues, loads, facts, ns, profile, ask);
  m->start = calloc(3 * (size_t)nodes + 1, sizeof(double)); /* written, but not read */
  m->end = m->start + nodes;
  m->exposed_by = m->end + nodes;
  r->length = length;
  r->count = nodes > length ? (nodes + length - 1) / length : 1;
  r->order = malloc((3 * (size_t)nodes + 1) * sizeof(int));
  r->place = r->order + nodes;
  r->window = r->place + nodes;
  r->nodes = malloc(length * sizeof(int));
  r->changed = malloc(r->count * sizeof(int));
  r->issue = calloc(m->queues, sizeof(int *));
  r->blocks = new_blocks(r->count, queues);
  r->tried = new_blocks(r->count, queues);
  int placed[queues];
  memset(placed, 0, sizeof placed);
  for (int at = 0; at < nodes; at++) {
    r->order[at] = at;
    r->place[at] = m->step[at] == START || m->step[at] == COMM ? placed[m->queue[at]]++ : -1;
  }
  for (int q = 0; q < queues; q++) r->issue[q] = malloc((placed[q] + 1) * sizeof(int));
  for (int at = 0; at < nodes; at++)
    if (r->place[at] >= 0) r->issue[m->queue[at]][r->place[at]] = at;
  for (int number = 0; number < r->count; number++) run_block(r, number);
  Totals all = r->now;
  for (int number = 0; number < r->count; number++) {
    all.step_ns += r->tried[number].took_ns;
    all.idle_ns += r->tried[number].idle_ns;
    all.exposed_ns += r->tried[number].exposed_ns;
  }
  Block *blocks = r->blocks;
  r->blocks = r->tried;
  r->tried = blocks;
  r->changes = 0;
  r->now = all;
  return r;
}

const Totals *replay_now(Replay *r) { return &r->now; }

void replay_free(Replay *r) {
  for (int q = 0; q < r->m.queues; q++) free(r->issue[q]);
  free(r->issue);
  free_blocks(r->blocks, r->count);
  free_blocks(r->tried, r->count);
  free(r->m.start);
  machine_free(&r->m);
  free(r->order);
  free(r->nodes);
  free(r->changed);
  free(r);
}
