/* The search of passes/refine.py with bitwise equal results, in a fraction of the time. refine.py, passes/order.py and
   schedule/memory.py describe the rules; names are the same here. Nodes are positions in the original schedule. */

#include "replay.c"

typedef long long Bytes;

/* List i is items[from[i]] .. items[from[i + 1] - 1]. */
typedef struct {
  const int *from, *items;
} Lists;

/* What does not change during a search; native_search.py has the same fields in the same order. */
typedef struct {
  int nodes, storages, clocks, computes, collectives;
  Replay *replays[2];
  Lists preds, succs, touches, alike;                /* by node; the last: by group */
  const int *group, *compute, *collective;           /* group: by node */
  const char *fixed, *blocking, *in_pool;            /* by node; the last: by storage */
  const Bytes *allocates, *pool_allocates, *scratch; /* by node; the first: outside of pools */
  const Bytes *bytes;                                /* by storage */
  Bytes base_bytes, limit, peak_without_gain, pool_bytes, final; /* final: -1 if there is no such limit */
  long replays_in_round, blocks_before;
  const unsigned *random; /* the state of Python's generator: 624 words and the index of the next one */
  double collectives_share, worth_repeating;
  int powers, most_together, proposals_per_replay, blocks_per_replay, rounds_without_gain;
} Facts;

typedef struct {
  double step_ns, both_ns, exposed_ns;
} Times;

typedef struct {
  Times now;
  long made, proposals, replays;
  const int *best; /* NULL if no move led to an order that may be the final one */
} Found;

/* Bytes by position, and their maximum; -1 while it has to be computed again. */
typedef struct {
  Bytes *values, most;
} Row;

typedef struct {
  Found found; /* first: `search_run` returns it */
  Facts f;
  int *order, *position, *death; /* death: by storage, the node after which it is freed */
  Bytes *freed, *pool_freed;     /* by node */
  Row outside, in_pools;
  /* The move that is tried: `nodes` at the positions from `low` on, and what it does to memory. */
  int low, count, *nodes, *staying;
  int *along, *touched, round;     /* along, touched: by node and by storage, `round` if this trial met it */
  int *last, *changed, changes;    /* last: by storage, the node that touches it last; changed: where that is new */
  Bytes *outside_tried, *in_pools_tried;
  /* The search. */
  unsigned random[624], next_random;
  int repeated_group, next_repeat, repeated_node, repeated_distance; /* moves to try next: those of the group's rest */
  enum { BEGIN_ROUND, DRAW, BEGIN_EXCHANGES, EXCHANGE } phase;
  int without_gain, distance, first, *by_position;
  long draws_left, draws_end;
  Times round_began, exchanges_began, best;
  int *best_order;
} Search;

static int is_less(Times one, Times other) {
  return one.both_ns < other.both_ns || (one.both_ns == other.both_ns && one.exposed_ns < other.exposed_ns);
}

/* --- memory */

static Bytes most_of(Row *row, int count) {
  if (row->most < 0)
    for (int at = 0; at < count; at++)
      if (row->values[at] > row->most) row->most = row->values[at];
  return row->most;
}

static Bytes maximum(const Bytes *values, int count) {
  Bytes found = values[0];
  for (int i = 1; i < count; i++)
    if (values[i] > found) found = values[i];
  return found;
}

static void put(Row *row, int low, const Bytes *values, int count) {
  Bytes made = maximum(values, count);
  if (row->most >= 0 && made >= row->most) row->most = made;
  else if (maximum(row->values + low, count) == row->most) row->most = -1;
  memcpy(row->values + low, values, count * sizeof *values);
}

/* Free storages after the nodes that touch them last in the trial (times = 1), or undo that (times = -1). */
static void free_after(Search *s, int times) {
  for (int i = 0; i < s->changes; i++) {
    int storage = s->changed[i];
    Bytes *freed = s->f.in_pool[storage] ? s->pool_freed : s->freed, bytes = times * s->f.bytes[storage];
    freed[s->death[storage]] -= bytes;
    freed[s->last[storage]] += bytes;
  }
}

static void try_memory(Search *s) {
  Facts *f = &s->f;
  int low = s->low, high = low + s->count, touched = 0;
  s->round++;
  for (int i = 0; i < s->count; i++) {
    int node = s->nodes[i];
    for (int j = f->touches.from[node]; j < f->touches.from[node + 1]; j++) {
      int storage = f->touches.items[j], at = s->position[s->death[storage]];
      if (at < low || at >= high) continue;
      if (s->touched[storage] != s->round) s->changed[touched++] = storage;
      s->touched[storage] = s->round;
      s->last[storage] = node;
    }
  }
  s->changes = 0;
  for (int i = 0; i < touched; i++)
    if (s->death[s->changed[i]] != s->last[s->changed[i]]) s->changed[s->changes++] = s->changed[i];
  Bytes outside = f->base_bytes, in_pools = 0;
  if (low) {
    int before = s->order[low - 1];
    outside = s->outside.values[low - 1] - f->scratch[before] - s->freed[before];
    in_pools = s->in_pools.values[low - 1] - s->pool_freed[before];
  }
  free_after(s, 1);
  for (int i = 0; i < s->count; i++) {
    int node = s->nodes[i];
    outside += f->allocates[node];
    in_pools += f->pool_allocates[node];
    s->outside_tried[i] = outside + f->scratch[node];
    s->in_pools_tried[i] = in_pools;
    outside -= s->freed[node];
    in_pools -= s->pool_freed[node];
  }
  free_after(s, -1);
}

static int fits(Search *s, Bytes limit) {
  Bytes outside = maximum(s->outside_tried, s->count), in_pools = maximum(s->in_pools_tried, s->count);
  Bytes pools = most_of(&s->in_pools, s->f.nodes);
  if (in_pools > pools) {
    Bytes elsewhere = most_of(&s->outside, s->f.nodes);
    outside = elsewhere > outside ? elsewhere : outside;
    pools = in_pools;
  }
  return outside + pools <= limit && in_pools <= s->f.pool_bytes;
}

static int is_final(Search *s) {
  return s->f.final < 0 || most_of(&s->outside, s->f.nodes) + most_of(&s->in_pools, s->f.nodes) <= s->f.final;
}

/* --- moves */

/* Propose to move `node` by `distance`, with the nodes that must move along; return whether that is possible. */
static int shift(Search *s, int node, int distance) {
  Facts *f = &s->f;
  int at = s->position[node], to = at + distance, last = f->nodes - 1, step = distance < 0 ? -1 : 1;
  to = to < 0 ? 0 : to > last ? last : to;
  if (to == at) return 0;
  int low = at < to ? at : to, length = (at < to ? to : at) - low + 1, moving = 0, staying = 0;
  for (int i = low; i < low + length; i++)
    if (f->blocking[s->order[i]]) return 0;
  const Lists *edges = distance < 0 ? &f->preds : &f->succs;
  s->round++;
  s->along[node] = s->round;
  /* Found in the direction of the move; `nodes` is filled from the end that the moving nodes get to. */
  for (int i = 0, place = at; i < length; i++, place += step) {
    int other = s->order[place];
    if (s->along[other] != s->round) {
      s->staying[staying++] = other;
    } else if (f->fixed[other] || moving == f->most_together) {
      return 0;
    } else {
      s->nodes[moving++] = other;
      for (int j = edges->from[other]; j < edges->from[other + 1]; j++) s->along[edges->items[j]] = s->round;
    }
  }
  if (!staying) return 0;
  if (distance < 0) { /* both were found backwards; the moving nodes come first */
    for (int i = 0; i < moving / 2; i++) {
      int kept = s->nodes[i];
      s->nodes[i] = s->nodes[moving - 1 - i];
      s->nodes[moving - 1 - i] = kept;
    }
    for (int i = 0; i < staying; i++) s->nodes[moving + i] = s->staying[staying - 1 - i];
  } else {
    memmove(s->nodes + staying, s->nodes, moving * sizeof(int));
    memcpy(s->nodes, s->staying, staying * sizeof(int));
  }
  s->low = low;
  s->count = length;
  return 1;
}

/* Propose to swap two nodes; return whether that is possible. */
static int exchange(Search *s, int one, int other) {
  Facts *f = &s->f;
  int low = s->position[one], high = s->position[other];
  if (low > high) {
    int kept = low;
    low = high;
    high = kept;
  }
  int first = s->order[low], last = s->order[high];
  if (low == high || f->fixed[first] || f->fixed[last]) return 0;
  for (int i = low; i <= high; i++)
    if (f->blocking[s->order[i]]) return 0;
  for (int j = f->succs.from[first]; j < f->succs.from[first + 1]; j++) {
    int at = s->position[f->succs.items[j]];
    if (low < at && at <= high) return 0;
  }
  for (int j = f->preds.from[last]; j < f->preds.from[last + 1]; j++) {
    int at = s->position[f->preds.items[j]];
    if (low <= at && at < high) return 0;
  }
  s->low = low;
  s->count = high - low + 1;
  memcpy(s->nodes, s->order + low, s->count * sizeof(int));
  s->nodes[0] = last;
  s->nodes[s->count - 1] = first;
  return 1;
}

static void make(Search *s, Times times) {
  for (int c = 0; c < s->f.clocks; c++) { /* trivial where this move was tried last, as it nearly always was */
    replay_try(s->f.replays[c], s->low, s->nodes, s->count);
    replay_apply(s->f.replays[c]);
  }
  free_after(s, 1);
  for (int i = 0; i < s->changes; i++) s->death[s->changed[i]] = s->last[s->changed[i]];
  put(&s->outside, s->low, s->outside_tried, s->count);
  put(&s->in_pools, s->low, s->in_pools_tried, s->count);
  for (int i = 0; i < s->count; i++) {
    s->order[s->low + i] = s->nodes[i];
    s->position[s->nodes[i]] = s->low + i;
  }
  s->found.made++;
  s->found.now = times;
  if (is_less(times, s->best) && is_final(s)) {
    memcpy(s->best_order, s->order, s->f.nodes * sizeof(int));
    s->found.best = s->best_order;
    s->best = times;
  }
}

/* Make the proposed move unless it leads to a worse order; return the share of the step that it gains. */
static double try_move(Search *s, int possible) {
  Times now = s->found.now, times = {0};
  s->found.proposals++;
  if (!possible) return 0;
  for (int c = 0; c < s->f.clocks; c++) {
    const Totals *totals = replay_try(s->f.replays[c], s->low, s->nodes, s->count);
    s->found.replays++;
    if (!c) {
      if (totals->step_ns > now.step_ns) return 0;
      times.step_ns = totals->step_ns;
      times.exposed_ns = totals->exposed_ns;
    }
    times.both_ns = times.step_ns + totals->step_ns;
  }
  if (is_less(now, times)) return 0;
  try_memory(s);
  if (!fits(s, is_less(times, now) ? s->f.limit : s->f.peak_without_gain)) return 0;
  make(s, times);
  return now.both_ns ? 1 - times.both_ns / now.both_ns : 0;
}

/* --- the search */

static unsigned next_word(Search *s) {
  unsigned *words = s->random;
  if (s->next_random >= 624) {
    for (int i = 0; i < 624; i++) {
      unsigned both = (words[i] & 0x80000000U) | (words[(i + 1) % 624] & 0x7fffffffU);
      words[i] = words[(i + 397) % 624] ^ (both >> 1) ^ (both & 1 ? 0x9908b0dfU : 0);
    }
    s->next_random = 0;
  }
  unsigned word = words[s->next_random++];
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680U;
  word ^= (word << 15) & 0xefc60000U;
  return word ^ (word >> 18);
}

/* Return the next `random()` of Python's generator, the Mersenne Twister. */
static double draw(Search *s) {
  unsigned high = next_word(s) >> 5, low = next_word(s) >> 6;
  return (high * 67108864.0 + low) * (1.0 / 9007199254740992.0);
}

/* Return the next node to repeat the last good move with; -1 if there is none. */
static int next_to_repeat(Search *s) {
  const Lists *alike = &s->f.alike;
  while (s->repeated_group >= 0 && s->next_repeat < alike->from[s->repeated_group + 1]) {
    int node = alike->items[s->next_repeat++];
    if (node != s->repeated_node) return node;
  }
  s->repeated_group = -1;
  return -1;
}

static void draw_move(Search *s) {
  Facts *f = &s->f;
  int node = next_to_repeat(s);
  if (node >= 0) {
    try_move(s, shift(s, node, s->repeated_distance));
    return;
  }
  int among_collectives = draw(s) < f->collectives_share || !f->computes;
  const int *among = among_collectives ? f->collective : f->compute;
  node = among[(int)(draw(s) * (among_collectives ? f->collectives : f->computes))];
  int most = 1 << (int)(draw(s) * f->powers), distance = most + (int)(draw(s) * most);
  if (draw(s) >= 0.5) distance = -distance;
  if (try_move(s, shift(s, node, distance)) > f->worth_repeating) {
    s->repeated_group = f->group[node];
    s->next_repeat = f->alike.from[s->repeated_group];
    s->repeated_node = node;
    s->repeated_distance = distance;
  }
}

/* Try one more move; return 0 if the search has ended. */
static int try_next(Search *s) {
  Facts *f = &s->f;
  for (;;) switch (s->phase) {
    case BEGIN_ROUND:
      if (!f->collectives || s->without_gain >= f->rounds_without_gain) return 0;
      s->round_began = s->found.now;
      s->draws_left = f->proposals_per_replay * f->replays_in_round;
      s->draws_end = s->found.replays + f->replays_in_round;
      s->phase = DRAW;
      break;
    case DRAW:
      if (s->draws_left && s->found.replays < s->draws_end) {
        s->draws_left--;
        draw_move(s);
        return 1;
      }
      s->phase = BEGIN_EXCHANGES;
      break;
    case BEGIN_EXCHANGES: {
      for (int i = 0; i < f->nodes; i++) s->along[i] = 0;
      for (int i = 0; i < f->computes; i++) s->along[f->compute[i]] = -1;
      int count = 0;
      for (int at = 0; at < f->nodes; at++)
        if (s->along[s->order[at]] < 0) s->by_position[count++] = s->order[at];
      s->exchanges_began = s->found.now;
      s->distance = 1;
      s->first = 0;
      s->phase = EXCHANGE;
      break;
    }
    case EXCHANGE:
      if (s->distance >= f->computes || s->distance >= 1 << f->powers) {
        if (is_less(s->found.now, s->exchanges_began)) {
          s->phase = BEGIN_EXCHANGES;
        } else {
          s->without_gain = is_less(s->found.now, s->round_began) ? 0 : s->without_gain + 1;
          s->phase = BEGIN_ROUND;
        }
      } else if (s->first >= f->computes - s->distance) {
        s->distance++;
        s->first = 0;
      } else {
        int *one = &s->by_position[s->first++], *other = one + s->distance, kept = *one;
        long made = s->found.made;
        try_move(s, exchange(s, *one, *other));
        if (s->found.made > made) {
          *one = *other;
          *other = kept;
        }
        return 1;
      }
    }
}

static double used(Search *s) {
  Facts *f = &s->f;
  long blocks = -f->blocks_before;
  for (int c = 0; c < f->clocks; c++) blocks += f->replays[c]->now.blocks_replayed;
  double replays = s->found.replays, proposals = (double)s->found.proposals / f->proposals_per_replay;
  return most(most(replays, proposals), (double)blocks / f->blocks_per_replay);
}

/* Search until this much effort is used up since the search began, or so many moves are made (-1: any number). */
const Found *search_run(Search *s, long effort, long most_moves) {
  while (s->found.made != most_moves && used(s) < effort && try_next(s)) {
  }
  return &s->found;
}

Search *search_new(const Facts *facts) {
  Search *s = calloc(1, sizeof *s);
  Facts *f = &s->f;
  *f = *facts;
  size_t nodes = f->nodes + 1, storages = f->storages + 1;
  int **by_node[] = {&s->order, &s->position, &s->nodes, &s->staying, &s->along, &s->by_position, &s->best_order};
  for (size_t i = 0; i < sizeof by_node / sizeof *by_node; i++) *by_node[i] = calloc(nodes, sizeof(int));
  int **by_storage[] = {&s->death, &s->touched, &s->last, &s->changed};
  for (size_t i = 0; i < sizeof by_storage / sizeof *by_storage; i++) *by_storage[i] = calloc(storages, sizeof(int));
  Bytes **bytes[] = {&s->freed, &s->pool_freed, &s->outside.values, &s->in_pools.values, &s->outside_tried,
                     &s->in_pools_tried};
  for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) *bytes[i] = calloc(nodes, sizeof(Bytes));
  for (int at = 0; at < f->nodes; at++) s->order[at] = s->position[at] = s->nodes[at] = at;
  for (int storage = 0; storage < f->storages; storage++) s->death[storage] = -1;
  for (int node = 0; node < f->nodes; node++)
    for (int j = f->touches.from[node]; j < f->touches.from[node + 1]; j++) s->death[f->touches.items[j]] = node;
  for (int storage = 0; storage < f->storages; storage++)
    if (s->death[storage] >= 0) (f->in_pool[storage] ? s->pool_freed : s->freed)[s->death[storage]] += f->bytes[storage];
  if (f->nodes) { /* the present order, tried and put */
    s->count = f->nodes;
    try_memory(s);
    put(&s->outside, 0, s->outside_tried, s->count);
    put(&s->in_pools, 0, s->in_pools_tried, s->count);
  }
  memcpy(s->random, f->random, sizeof s->random);
  s->next_random = f->random[624];
  s->repeated_group = -1;
  const Totals *first = &f->replays[0]->now, *last = &f->replays[f->clocks - 1]->now;
  s->found.now = (Times){first->step_ns, first->step_ns + last->step_ns, first->exposed_ns};
  s->best = is_final(s) ? s->found.now : (Times){INFINITY, INFINITY, INFINITY};
  return s;
}

void search_free(Search *s) {
  void *owned[] = {s->order, s->position, s->nodes, s->staying, s->along, s->by_position, s->best_order, s->death,
                   s->touched, s->last, s->changed, s->freed, s->pool_freed, s->outside.values, s->in_pools.values,
                   s->outside_tried, s->in_pools_tried};
  for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
  free(s);
}
