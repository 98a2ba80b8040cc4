/*
 * The protocol of docs/protocol.md (both return modes) for two ranks with one or two experts each, for Spin.
 * docs/model_checking.md says what the abstractions are and why they lose nothing.
 *
 * One step of an agent is one atomic block. A step that writes to a heap and signals does both at once: whoever is
 * signalled may run arbitrarily late, so a slow wire shows nothing that a slow reader does not.
 */

#ifndef BLOCKS
#define BLOCKS 1 /* token blocks of rank 0, at most; each call chooses how many it has, 0 included */
#endif
#ifndef BLOCKS1
#define BLOCKS1 1 /* of rank 1; not above BLOCKS */
#endif
#ifndef PAIRS
#define PAIRS 2 /* (token, k) pairs of a block; each goes to either rank, or is dropped */
#endif
#ifndef ROWS
#define ROWS 2 /* rows of a tile */
#endif
#ifndef EXPERTS
#define EXPERTS 1 /* of a rank, each with a former of its own; pair k of a block goes to a rank's expert k % EXPERTS */
#endif
#ifdef IDLE_RANK /* rank 1 has no expert */
#define EXPERTS_OF(r) ((r) == 0 -> EXPERTS : 0)
#else
#define EXPERTS_OF(r) EXPERTS
#endif
#ifndef COLUMNS0
#define COLUMNS0 1 /* GEMM0 tasks of a tile */
#endif
#ifndef COLUMNS1
#define COLUMNS1 1 /* GEMM1 tasks of a tile */
#endif
#ifndef GROUPS
#define GROUPS 1 /* return groups, of COLUMNS1 / GROUPS columns each */
#endif
#ifndef PROCESSORS0
#define PROCESSORS0 1 /* processors of rank 0 */
#endif
#ifndef PROCESSORS1
#define PROCESSORS1 1
#endif
#ifndef WINDOW
#define WINDOW 1 /* words that the scheduler publishes ahead of the tickets taken */
#endif
#ifdef REDUCED /* return mode `reduced`; otherwise `direct` */
#define REDUCE_TASKS (PACKETS * COLUMNS1)
#else
#define REDUCE_TASKS 0
#endif

#define RANKS 2
#define PACKETS (RANKS * BLOCKS)
#define ENTRIES ((BLOCKS + BLOCKS1) * PAIRS / EXPERTS)   /* of an expert */
#define EXPERT_TILES ((ENTRIES + ROWS - 1) / ROWS)
#define TILES (EXPERTS * EXPERT_TILES)
#define COMBINES (BLOCKS * GROUPS)
#define TASKS (TILES * (COLUMNS0 + COLUMNS1) + REDUCE_TASKS + COMBINES)
#define LIST (TILES + RANKS * COLUMNS1)
#define BLOCKS_MOST(r) ((r) == 0 -> BLOCKS : BLOCKS1)
#define PROCESSORS(r) ((r) == 0 -> PROCESSORS0 : PROCESSORS1)
#if PROCESSORS0 > PROCESSORS1
#define STOPS PROCESSORS0
#else
#define STOPS PROCESSORS1
#endif
#ifdef BUG_SHORT_QUEUE /* no room for the stop words */
#define SLOTS TASKS
#else
#define SLOTS (TASKS + STOPS)
#endif

#if TILES != 2 || REDUCE_TASKS > 4 || COMBINES > 2 || ROWS > 2
#error "the options of os() and the items that a processor holds are written out for less"
#endif

/* Epochs 1 2 3 4 1 2 ...: a rank forgets what it holds of epoch e when it ends call e, which changes no comparison
 * with an epoch yet to come, so four names stand for any number of calls. 0 is older than every call. */
#define NEXT(e) ((e) % 4 + 1)
#define IN_FLIGHT 8 /* added to the epoch of a payload until a release that covers it is visible */

/* What a signal leaves of IN_FLIGHT on the payload that its sender knows of. */
#ifdef BUG_MISSING_RELEASE
#define AT_SIGNAL IN_FLIGHT
#else
#define AT_SIGNAL 0
#endif

/* Writes that a fetch-add on a counter of (source, group) orders before the signal: those of who adds and, since the
 * counters acquire and release, those of everyone who added before. Formers write nothing, but may be the last. */
#ifdef BUG_RELAXED_COUNTER
#define COVERS (STOPS + 1)
#define COVERED(p, g) covered[(n * RANKS + (p)) * GROUPS + (g)]
#else
#define COVERS 1
#define COVERED(p, g) covered[(p) * GROUPS + (g)]
#endif

#ifdef BUG_EPOCH_REUSE /* packets of all epochs share one copy */
#define COPY(e) 0
#else
#define COPY(e) ((e) & 1)
#endif
#define CALL(e, p) (((e) & 1) * RANKS + (p))
#define PACKET(e, p, b) (COPY(e) * PACKETS + (p) * BLOCKS + (b))
#ifdef REDUCED
#define RETURN_ROWS RANKS /* of a block, which counts as one token: what each rank sums */
#define COUNTERS COLUMNS1 /* pending counters of a source */
#define SLOT_OF(c) (c)
#else
#define RETURN_ROWS PAIRS
#define COUNTERS GROUPS
#define SLOT_OF(c) GROUP_OF(c)
#endif
#define RETURN(b, slot, c) (((b) * RETURN_ROWS + (slot)) * COLUMNS1 + (c))
#define GROUP_OF(c) ((c) * GROUPS / COLUMNS1)

/* Pending: (row, column) products to compute, and above them the experts that have seen the source's last packet. */
#define SEEN 16
#define COMPLETE (SEEN * EXPERTS)

/* Task words: kind and index. Zero is an empty slot. */
#define GEMM0 16
#define GEMM1 32
#define REDUCE 48
#define COMBINE 64
#define STOP 80
#define KIND(w) ((w) & 112)
#define INDEX(w) ((w) & 15)

typedef Rank {
	byte epoch;

	/* Symmetric heap: written by the rank that the index names, read here. */
	byte call_epoch[2 * RANKS];
	byte call_blocks[2 * RANKS];
	byte packet_epoch[2 * PACKETS];
	byte packet_count[2 * PACKETS];
	byte entries[2 * PACKETS];     /* payload: epoch */
	byte entry_pairs[2 * PACKETS]; /* the pairs that the entries name, one bit each */
	byte rows[PACKETS];            /* payload: epoch */
	byte return_epoch[RANKS * GROUPS]; /* [q][g] */
	byte return_rows[BLOCKS * RETURN_ROWS * COLUMNS1]; /* payload: epoch */

	/* Own memory. */
	byte routed[RANKS * BLOCKS];   /* [q][b] pairs of own block b that rank q got */
	byte consumed[EXPERTS * RANKS]; /* [x][p] packets that expert x has tiles of; one more once it has closed p */
	byte entry[EXPERTS * ENTRIES]; /* [x] entries in tile order: its i-th tile is entry[x * ENTRIES + i * ROWS ...] */
	byte filled[EXPERTS];
	byte done0[TILES];             /* dependency counters, reset by whoever completes them: of a tile's GEMM1, ... */
	byte pending[RANKS * COUNTERS]; /* ... of a source's Reduces or, with `direct`, its return signals, ... */
	byte reduced[RANKS * GROUPS];  /* ... and, with `reduced`, of the return signals */
	byte covered[COVERS * RANKS * GROUPS]; /* return rows whose writes the next fetch-add is ordered behind */
	byte list[LIST];               /* the ready list: GEMM1 of a tile, Reduce of a source's column */
	byte list_head;
	byte list_tail;
	byte queue[SLOTS];             /* the ready queue */
	byte head;                     /* tickets taken */
	byte tail;                     /* words published */
	byte published0[TILES];
	byte published1[TILES];
	byte ready1;                   /* drained from the ready list, not yet published: tiles ... */
	byte ready_reduce;             /* ... and Reduce tasks */
	byte reduces;                  /* published Reduce tasks */
	byte combines;                 /* published combines */
	bool ended;                    /* the stop words are published */
	byte stopped;                  /* processors that left the call */

	/* What was executed, for the assertions alone. */
	byte executed0;
	byte executed1;
	byte executed_reduce;
	byte executed_combine;
}
Rank rank[RANKS];

#define me rank[r]
#define you rank[1 - r]

/* Scratch of one atomic block; no part of the state. */
hidden byte i, j, p_, b_, k_, c_, q_, id, bits, count, last, pushes;

#define ANNOUNCED(p) (me.call_epoch[CALL(me.epoch, p)] == me.epoch)
#define BLOCKS_OF(p) me.call_blocks[CALL(me.epoch, p)]
#define ARRIVED(p, b) (me.packet_epoch[PACKET(me.epoch, p, b)] == me.epoch)
#define CONSUMED(x, p) me.consumed[(x) * RANKS + (p)]
#define CONSUMABLE(x, p) (EXPERTS_OF(r) > (x) && ANNOUNCED(p) && CONSUMED(x, p) < BLOCKS_OF(p) \
	&& ARRIVED(p, CONSUMED(x, p)))
#define CLOSABLE(x, p) (EXPERTS_OF(r) > (x) && ANNOUNCED(p) && CONSUMED(x, p) == BLOCKS_OF(p))
#define CLOSED(x, p) (ANNOUNCED(p) && CONSUMED(x, p) > BLOCKS_OF(p))
#define ALL_CLOSED(x) (CLOSED(x, 0) && CLOSED(x, 1))
/* The OS actor looks for itself; what it has seen stays in place until it ends the call. */
#if BLOCKS > 1
#define SEEN_ALL(p) (ANNOUNCED(p) && (BLOCKS_OF(p) < 1 || ARRIVED(p, 0)) && (BLOCKS_OF(p) < 2 || ARRIVED(p, 1)))
#else
#define SEEN_ALL(p) (ANNOUNCED(p) && (BLOCKS_OF(p) < 1 || ARRIVED(p, 0)))
#endif
#ifdef BUG_UNFLUSHED_TILES /* the call's tasks are counted without the partial tiles */
#define FLUSHED(x) false
#else
#define FLUSHED(x) ALL_CLOSED(x)
#endif
#define TILE_READY(t) (me.filled[(t) / EXPERT_TILES] >= ((t) % EXPERT_TILES + 1) * ROWS \
	|| (FLUSHED((t) / EXPERT_TILES) && USED(t)))
#define USED(t) (me.filled[(t) / EXPERT_TILES] > (t) % EXPERT_TILES * ROWS)
#define ROOM (me.tail < me.head + WINDOW) /* not tail - head < WINDOW: tickets run ahead of words */
#define RETURNED(g) (me.return_epoch[g] == me.epoch && me.return_epoch[GROUPS + (g)] == me.epoch)
#define PUBLISHED(t) (!TILE_READY(t) || me.published0[t] == COLUMNS0 && me.published1[t] == COLUMNS1)
#ifdef BUG_LOST_TERMINATION /* a processor without its stop word */
#define STOPS_OF(r) (PROCESSORS(r) - 1)
#else
#define STOPS_OF(r) PROCESSORS(r)
#endif
#ifdef REDUCED
#define REDUCES(r) (EXPERTS_OF(r) == 0 -> 0 : (BLOCKS_OF(0) + BLOCKS_OF(1)) * COLUMNS1)
#else
#define REDUCES(r) 0
#endif
#define ALL_PUBLISHED (SEEN_ALL(0) && SEEN_ALL(1) && ALL_CLOSED(0) \
	&& ALL_CLOSED((EXPERTS_OF(r) == 0 -> 0 : EXPERTS - 1)) \
	&& PUBLISHED(0) && PUBLISHED(1) && me.reduces == REDUCES(r) \
	&& me.combines == (1 << BLOCKS_OF(r) * GROUPS) - 1)

#define ALL_PAIRS ((1 << PAIRS) - 1)
#define ROUTED(q, b) me.routed[(q) * BLOCKS + (b)]
/* Block b = task / GROUPS, group g = task % GROUPS: this group, and those before it, have come from every rank. */
#define COMBINABLE(task) (ANNOUNCED(r) && (task) < BLOCKS_OF(r) * GROUPS && !((me.combines >> (task)) & 1) \
	&& RETURNED(0) && RETURNED((task) % GROUPS))

/* Behind the last word; its slot was taken and cleared long ago. */
inline publish(word) {
	assert(me.queue[me.tail % SLOTS] == 0);
	me.queue[me.tail % SLOTS] = word;
	me.tail++
}

/* A payload must be of this call, and a release that covers its write must have been seen. */
#define check(payload) assert((payload) == me.epoch)

/* A call begins and announces itself, with any number of blocks. No peer is two calls away. */
inline begin_call() {
	select(blocks : 0 .. BLOCKS_MOST(r));
	me.epoch = NEXT(me.epoch);
	d_step {
		assert(you.epoch == me.epoch || NEXT(you.epoch) == me.epoch || you.epoch == NEXT(me.epoch));
		for (q_ : 0 .. RANKS - 1) {
			rank[q_].call_blocks[CALL(me.epoch, r)] = blocks;
			rank[q_].call_epoch[CALL(me.epoch, r)] = me.epoch;
#ifdef BUG_EAGER_RETURN /* a rank without experts says at once that it owes nothing */
			for (i : 0 .. GROUPS - 1) {
				j = r * GROUPS + i;
				rank[q_].return_epoch[j] = (EXPERTS_OF(r) == 0 -> me.epoch : rank[q_].return_epoch[j])
			}
#endif
		}
		blocks = 0
	}
}

/* Packets of own block b, by its routing. */
inline dispatch(b) {
	for (q_ : 0 .. RANKS - 1) {
		bits = ROUTED(q_, b);
		j = PACKET(me.epoch, r, b);
		count = 0;
		for (k_ : 0 .. PAIRS - 1) {
			count = count + ((bits >> k_) & 1)
		}
		if
		:: bits ->
			rank[q_].entry_pairs[j] = bits;
			rank[q_].entries[j] = me.epoch + AT_SIGNAL;
			if
			:: q_ != r -> rank[q_].rows[r * BLOCKS + b] = me.epoch + AT_SIGNAL
			:: else /* own rows are read from the input */
			fi
		:: else /* an empty packet: neither rows nor entries */
		fi;
		rank[q_].packet_count[j] = count;
		rank[q_].packet_epoch[j] = me.epoch
	}
}

/* All rows of source p that this rank computes are: column c of its blocks can be summed. */
inline reducible(p, c) {
	for (b_ : 0 .. BLOCKS - 1) {
		if
		:: b_ < BLOCKS_OF(p) -> me.ready_reduce = me.ready_reduce | (1 << ((p * BLOCKS + b_) * COLUMNS1 + c))
		:: else
		fi
	}
}

/* The group's rows are at their home: the signal releases what its sender knows of. */
inline signal_return(home, g) {
	for (k_ : 0 .. BLOCKS * RETURN_ROWS * COLUMNS1 - 1) {
		if
		:: (me.COVERED(home, g) >> k_) & 1 -> rank[home].return_rows[k_] = me.epoch + AT_SIGNAL
		:: else
		fi
	}
	for (k_ : 0 .. COVERS - 1) {
		me.covered[(k_ * RANKS + home) * GROUPS + g] = 0
	}
	rank[home].return_epoch[r * GROUPS + g] = me.epoch
}

/* A counter changes; if it is complete now, whoever changed it resets it. */
inline change_pending(p, slot, change) {
	me.pending[(p) * COUNTERS + slot] = me.pending[(p) * COUNTERS + slot] + change;
	last = me.pending[(p) * COUNTERS + slot] == COMPLETE;
#ifndef BUG_COUNTER_KEPT
	if
	:: last -> me.pending[(p) * COUNTERS + slot] = 0
	:: else
	fi
#endif
}

/* Expert x has seen source p's last packet. */
inline close(x, p) {
	for (i : 0 .. COUNTERS - 1) {
		change_pending(p, i, SEEN);
		if
#ifdef REDUCED
		:: last -> reducible(p, i)
#else
		:: last -> signal_return(p, i)
#endif
		:: else
		fi
	}
}

/* A rank without experts owes nothing to source p, which is in this call. */
inline owe_nothing(p) {
#ifndef BUG_EAGER_RETURN
	for (i : 0 .. GROUPS - 1) {
		signal_return(p, i)
	}
#endif
	CONSUMED(0, p) = BLOCKS_OF(p) + 1
}

/* What the next packet of source p has for expert x enters its tiles. */
inline consume(x, p) {
	j = PACKET(me.epoch, p, CONSUMED(x, p));
#ifdef BUG_EARLY_CLOSE /* the source is closed before the rows of its last packet are added */
	if
	:: CONSUMED(x, p) + 1 == BLOCKS_OF(p) -> close(x, p)
	:: else
	fi;
#endif
	if
	:: me.packet_count[j] > 0 ->
		check(me.entries[j]);
		for (k_ : 0 .. PAIRS - 1) {
			if
			:: k_ % EXPERTS == x && ((me.entry_pairs[j] >> k_) & 1) ->
				for (i : 0 .. COLUMNS1 - 1) {
					me.pending[p * COUNTERS + SLOT_OF(i)]++
				}
				me.entry[x * ENTRIES + me.filled[x]] = (p * BLOCKS + CONSUMED(x, p)) * PAIRS + k_;
				me.filled[x]++
			:: else
			fi
		}
	:: else
	fi;
	CONSUMED(x, p)++;
#ifndef LATE_CLOSE
	if
	:: CONSUMED(x, p) == BLOCKS_OF(p) ->
#ifndef BUG_EARLY_CLOSE
		close(x, p);
#endif
		CONSUMED(x, p)++
	:: else
	fi
#endif
}

/* Entry i of tile t, as source, block and pair. */
#define HAS(t, i) ((t) % EXPERT_TILES * ROWS + (i) < me.filled[(t) / EXPERT_TILES])
inline read_entry(t, i) {
	id = me.entry[(t) / EXPERT_TILES * ENTRIES + (t) % EXPERT_TILES * ROWS + i];
	k_ = id % PAIRS;
	b_ = id / PAIRS % BLOCKS;
	p_ = id / PAIRS / BLOCKS
}

inline read_gemm0(t) {
	for (i : 0 .. ROWS - 1) {
		if
		:: HAS(t, i) ->
			read_entry(t, i);
			if
			:: p_ != r -> check(me.rows[p_ * BLOCKS + b_])
			:: else /* own rows are read from the input */
			fi
		:: else
		fi
	}
}

inline read_gemm1(t) {
	for (c_ : 0 .. COLUMNS0 - 1) {
		assert((me.executed0 >> ((t) * COLUMNS0 + c_)) & 1)
	}
}

#ifdef REDUCED
/* All of the packet is staged; of an empty one, nothing. */
inline read_reduce(packet, c) {
	j = PACKET(me.epoch, (packet) / BLOCKS, (packet) % BLOCKS);
	if
	:: me.packet_count[j] > 0 -> check(me.entries[j])
	:: else
	fi;
	count = 0;
	for (q_ : 0 .. TILES - 1) {
		for (i : 0 .. ROWS - 1) {
			if
			:: HAS(q_, i) ->
				read_entry(q_, i);
				if
				:: p_ * BLOCKS + b_ == packet ->
					assert((me.executed1 >> (q_ * COLUMNS1 + c)) & 1);
					count++
				:: else
				fi
			:: else
			fi
		}
	}
	assert(count == me.packet_count[j])
}
#endif

inline read_combine(b, g) {
	for (k_ : 0 .. RETURN_ROWS - 1) {
		for (c_ : (g) * (COLUMNS1 / GROUPS) .. (g) * (COLUMNS1 / GROUPS) + COLUMNS1 / GROUPS - 1) {
#ifdef REDUCED
			if
			:: ROUTED(k_, b) -> check(me.return_rows[RETURN(b, k_, c_)])
			:: else
			fi
#else
			if
			:: ((ROUTED(0, b) | ROUTED(1, b)) >> k_) & 1 -> check(me.return_rows[RETURN(b, k_, c_)])
			:: else /* dropped */
			fi
#endif
		}
	}
}

/* All that a task reads. */
inline read(word) {
	d_step {
		if
		:: KIND(word) == GEMM0 -> read_gemm0(INDEX(word) / COLUMNS0)
		:: KIND(word) == GEMM1 -> read_gemm1(INDEX(word) / COLUMNS1)
#ifdef REDUCED
		:: KIND(word) == REDUCE -> read_reduce(INDEX(word) / COLUMNS1, INDEX(word) % COLUMNS1)
#endif
		:: KIND(word) == COMBINE -> read_combine(INDEX(word) / GROUPS, INDEX(word) % GROUPS)
		fi
	}
}

/* A task is executed, for the first time. */
inline once(done, task) {
	assert(!((done >> (task)) & 1));
	done = done | (1 << (task))
}

/* A return row is written at its home; the writer knows of it. */
inline write_return(home, b, slot, c) {
	j = RETURN(b, slot, c);
	assert(rank[home].return_rows[j] != me.epoch && rank[home].return_rows[j] < IN_FLIGHT);
	rank[home].return_rows[j] = me.epoch + IN_FLIGHT;
	me.COVERED(home, GROUP_OF(c)) = me.COVERED(home, GROUP_OF(c)) | (1 << j)
}

/* A processor's item for the ready list. */
inline reserve(item) {
	push[pushes] = item;
	pushes++
}

inline retire_gemm0(t) {
	me.done0[t]++;
	if
	:: me.done0[t] == COLUMNS0 ->
		me.done0[t] = 0;
		reserve(GEMM1 + t)
	:: else
	fi
}

/* `direct` writes the rows home and signals with the last of a group; `reduced` has them staged and wakes Reduce. */
inline retire_gemm1(t, c) {
	for (i : 0 .. ROWS - 1) {
		if
		:: HAS(t, i) ->
			read_entry(t, i);
#ifndef REDUCED
			write_return(p_, b_, k_, c);
#endif
			change_pending(p_, SLOT_OF(c), -1);
			if
#ifdef REDUCED
			:: last -> reserve(REDUCE + p_ * COLUMNS1 + c)
#else
			:: last -> signal_return(p_, GROUP_OF(c))
#endif
			:: else
			fi
		:: else
		fi
	}
}

/* Writes the packet's sums home, if it has entries, and signals with the last of the source's group. */
inline retire_reduce(packet, c) {
	p_ = (packet) / BLOCKS;
	b_ = (packet) % BLOCKS;
	if
	:: me.packet_count[PACKET(me.epoch, p_, b_)] > 0 -> write_return(p_, b_, r, c)
	:: else
	fi;
	id = p_ * GROUPS + GROUP_OF(c);
	me.reduced[id]++;
	if
	:: me.reduced[id] == BLOCKS_OF(p_) * (COLUMNS1 / GROUPS) ->
		me.reduced[id] = 0;
		signal_return(p_, GROUP_OF(c))
	:: else
	fi
}

#define forget(word) word = ((word) == me.epoch -> 0 : word)

/* The kernel ends. Nothing was cleared, and nothing needs to be; then this rank's heap forgets the call (see NEXT). */
inline end_call() {
	for (i : 0 .. TILES - 1) {
		assert(((me.executed0 >> (i * COLUMNS0)) & ((1 << COLUMNS0) - 1)) == (USED(i) -> (1 << COLUMNS0) - 1 : 0));
		assert(((me.executed1 >> (i * COLUMNS1)) & ((1 << COLUMNS1) - 1)) == (USED(i) -> (1 << COLUMNS1) - 1 : 0))
	}
#ifdef REDUCED
	for (i : 0 .. PACKETS - 1) {
		bits = (i % BLOCKS < BLOCKS_OF(i / BLOCKS) && EXPERTS_OF(r) > 0);
		assert(((me.executed_reduce >> (i * COLUMNS1)) & ((1 << COLUMNS1) - 1)) == bits * ((1 << COLUMNS1) - 1))
	}
#endif
	assert(me.executed_combine == (1 << BLOCKS_OF(r) * GROUPS) - 1);
	assert(me.head == me.tail && me.list_head == me.list_tail && me.ready1 == 0 && me.ready_reduce == 0);
	for (i : 0 .. SLOTS - 1) {
		assert(me.queue[i] == 0)
	}
	for (i : 0 .. RANKS * COUNTERS - 1) {
		assert(me.pending[i] == 0)
	}
	for (i : 0 .. RANKS * GROUPS - 1) {
		assert(me.reduced[i] == 0)
	}
	for (i : 0 .. COVERS * RANKS * GROUPS - 1) {
		assert(me.covered[i] == 0)
	}
	for (i : 0 .. TILES - 1) {
		assert(me.done0[i] == 0);
		me.published0[i] = 0;
		me.published1[i] = 0
	}
	for (i : 0 .. LIST - 1) {
		assert(me.list[i] == 0)
	}
	for (i : 0 .. EXPERTS * ENTRIES - 1) {
		me.entry[i] = 0
	}
	for (i : 0 .. EXPERTS - 1) {
		me.filled[i] = 0
	}
	me.reduces = 0;
	me.head = 0; /* all slots are zero, so where the rings start is of no consequence */
	me.tail = 0;
	me.list_head = 0;
	me.list_tail = 0;
	me.combines = 0;
	me.ended = false;
	me.executed0 = 0;
	me.executed1 = 0;
	me.executed_reduce = 0;
	me.executed_combine = 0;
	for (i : 0 .. EXPERTS * RANKS - 1) {
		me.consumed[i] = 0
	}
	for (i : 0 .. RANKS * GROUPS - 1) {
		forget(me.return_epoch[i])
	}
	for (i : 0 .. RANKS - 1) {
		me.call_blocks[CALL(me.epoch, i)] = 0;
		forget(me.call_epoch[CALL(me.epoch, i)])
	}
	for (i : 0 .. PACKETS - 1) {
		j = PACKET(me.epoch, i / BLOCKS, i % BLOCKS);
		if
		:: me.packet_epoch[j] == me.epoch ->
			me.packet_epoch[j] = 0;
			me.packet_count[j] = 0
		:: else
		fi;
		if
		:: me.entries[j] == me.epoch ->
			me.entries[j] = 0;
			me.entry_pairs[j] = 0
		:: else
		fi;
		forget(me.rows[i])
	}
	for (i : 0 .. BLOCKS * RETURN_ROWS * COLUMNS1 - 1) {
		forget(me.return_rows[i])
	}
	for (i : 0 .. PACKETS - 1) {
		me.routed[i] = 0
	}
}

/* Subscriber, scheduler and formers. Where several options are open any is taken: every order policy is one of the
 * runs, and so is a former ahead of the subscriber. */
#define FORM(x, p) \
	d_step { CONSUMABLE(x, p) -> consume(x, p) } \
	:: d_step { CLOSABLE(x, p) -> close(x, p); CONSUMED(x, p)++ }
#define PUBLISH0(t) \
	d_step { \
		ROOM && TILE_READY(t) && me.published0[t] < COLUMNS0 -> \
		publish(GEMM0 + (t) * COLUMNS0 + me.published0[t]); \
		me.published0[t]++ \
	}
#define PUBLISH1(t) \
	d_step { \
		ROOM && ((me.ready1 >> (t)) & 1) -> \
		publish(GEMM1 + (t) * COLUMNS1 + me.published1[t]); \
		me.published1[t]++; \
		me.ready1 = (me.published1[t] == COLUMNS1 -> me.ready1 & ~(1 << (t)) : me.ready1) \
	}
#define PUBLISH_REDUCE(task) \
	d_step { \
		ROOM && ((me.ready_reduce >> (task)) & 1) -> \
		publish(REDUCE + (task)); \
		me.ready_reduce = me.ready_reduce & ~(1 << (task)); \
		me.reduces++ \
	}
#define PUBLISH_COMBINE(task) \
	d_step { \
		ROOM && COMBINABLE(task) -> \
		publish(COMBINE + (task)); \
		me.combines = me.combines | (1 << (task)) \
	}

proctype os(byte r) {
	byte blocks;
#ifdef BUG_RELAXED_COUNTER
	byte n = STOPS;
#endif
	atomic { begin_call() }
	do
	:: FORM(0, 0)
	:: FORM(0, 1)
#if EXPERTS > 1
	:: FORM(1, 0)
	:: FORM(1, 1)
#endif
#ifdef IDLE_RANK
	:: d_step { EXPERTS_OF(r) == 0 && SEEN_ALL(0) && !CLOSED(0, 0) -> owe_nothing(0) }
	:: d_step { EXPERTS_OF(r) == 0 && SEEN_ALL(1) && !CLOSED(0, 1) -> owe_nothing(1) }
#endif
	:: d_step {
			me.list[me.list_head % LIST] != 0 ->
			id = me.list[me.list_head % LIST];
			if
			:: KIND(id) == GEMM1 -> me.ready1 = me.ready1 | (1 << INDEX(id))
#ifdef REDUCED
			:: KIND(id) == REDUCE -> reducible(INDEX(id) / COLUMNS1, INDEX(id) % COLUMNS1)
#endif
			fi;
			me.list[me.list_head % LIST] = 0;
			me.list_head++
		}
	:: PUBLISH0(0)
	:: PUBLISH0(1)
	:: PUBLISH1(0)
	:: PUBLISH1(1)
	:: PUBLISH_COMBINE(0)
#if COMBINES > 1
	:: PUBLISH_COMBINE(1)
#endif
#ifdef REDUCED
	:: PUBLISH_REDUCE(0)
	:: PUBLISH_REDUCE(1)
#endif
#if REDUCE_TASKS > 2
	:: PUBLISH_REDUCE(2)
	:: PUBLISH_REDUCE(3)
#endif
	:: d_step {
			ALL_PUBLISHED && !me.ended ->
			for (i : 1 .. STOPS_OF(r)) {
				publish(STOP)
			}
			me.ended = true
		}
	:: me.stopped == PROCESSORS(r) ->
progress:
		atomic {
			me.stopped = 0;
			d_step { end_call() };
			begin_call()
		}
	od
}

#define NONE 255
#define ASK ticket = me.head; me.head++

#define STORE(lane) \
	d_step { \
		push[lane] -> \
		assert(me.list[(position + lane) % LIST] == 0); \
		me.list[(position + lane) % LIST] = push[lane]; \
		push[lane] = 0; \
		position = (STORED -> 0 : position) \
	}
#define STORED (push[0] == 0 && push[1] == 0)

/* Dispatches its blocks, then takes and executes tasks until it takes a stop word. */
proctype processor(byte r, n) {
	byte call = 4; /* the last call it was launched for */
	byte block = n;
	byte to0, to1;
	byte ticket = NONE;
	byte word;
	byte push[2];  /* items for the ready list, at most one per row of a tile ... */
	byte position; /* ... and their reserved places in it */

	do
	:: atomic {
			me.epoch != call ->
			call = me.epoch;
			do
			:: block < BLOCKS_OF(r) ->
				select(to0 : 0 .. ALL_PAIRS);
				select(to1 : 0 .. (EXPERTS_OF(1) == 0 -> 0 : ALL_PAIRS));
				ROUTED(0, block) = to0;
				d_step {
					ROUTED(1, block) = to1 & ~to0;
					dispatch(block);
					block = block + PROCESSORS(r)
				}
			:: else -> break
			od;
			block = n;
			to0 = 0;
			to1 = 0
		}
		do
		:: STORE(0)
#if ROWS > 1 && defined(REDUCED)
		:: STORE(1)
#endif
		:: d_step { STORED && ticket == NONE -> ASK }
		:: atomic {
				STORED && ticket != NONE && me.queue[ticket % SLOTS] != 0 ->
				word = me.queue[ticket % SLOTS];
				me.queue[ticket % SLOTS] = 0;
				ticket = NONE;
				if
				:: word == STOP ->
					word = 0;
					me.stopped++;
					break
				:: else
				fi;
				read(word); /* a task reads as early as this ... */
				if
				:: ASK /* under this task, or after it */
				:: true
				fi
			}
			atomic {
				read(word); /* ... and as late as this */
				d_step {
					if
					:: KIND(word) == GEMM0 ->
						once(me.executed0, INDEX(word));
						retire_gemm0(INDEX(word) / COLUMNS0)
					:: KIND(word) == GEMM1 ->
						once(me.executed1, INDEX(word));
						retire_gemm1(INDEX(word) / COLUMNS1, INDEX(word) % COLUMNS1)
#ifdef REDUCED
					:: KIND(word) == REDUCE ->
						once(me.executed_reduce, INDEX(word));
						retire_reduce(INDEX(word) / COLUMNS1, INDEX(word) % COLUMNS1)
#endif
					:: KIND(word) == COMBINE ->
						once(me.executed_combine, INDEX(word))
					fi;
					word = 0;
					if
					:: pushes ->
						position = me.list_tail;
						me.list_tail = me.list_tail + pushes;
						pushes = 0
					:: else
					fi
				}
			}
		od
	od
}

init {
	byte n;
	atomic {
		rank[0].epoch = 4;
		rank[1].epoch = 4;
		run os(0);
		run os(1);
		for (n : 0 .. PROCESSORS0 - 1) {
			run processor(0, n)
		}
		for (n : 0 .. PROCESSORS1 - 1) {
			run processor(1, n)
		}
	}
}
