/*
 * The protocol of docs/protocol.md for two ranks with one or two experts each, for Spin: both return modes between ranks
 * that map each other's memory, and the way by puts between ranks that do not. docs/model_checking.md says what the
 * abstractions are and why they lose nothing.
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
#ifndef PIECES
#define PIECES 1 /* of Reduce in a block's rows of a return group */
#endif
#ifndef PARTS
#define PARTS 1 /* of a packet for another rank */
#endif
#ifndef PROCESSORS0
#define PROCESSORS0 1 /* processors of rank 0 */
#endif
#ifndef PROCESSORS1
#define PROCESSORS1 1
#endif
#ifndef SENDERS0
#define SENDERS0 1 /* senders of rank 0 */
#endif
#ifndef SENDERS1
#define SENDERS1 1
#endif
#ifndef WINDOW
#define WINDOW 1 /* words that the scheduler publishes ahead of the tickets taken */
#endif
/* REDUCED: return mode `reduced`; otherwise `direct`. PUTS, with it: peers are not mapped. */
#if defined(PUTS) && (!defined(REDUCED) || GROUPS != 1 || PARTS != 1)
#error "puts send whole blocks, and return sums, in one group"
#endif

#define RANKS 2
#define NONE 255
#define PACKETS (RANKS * BLOCKS)
#define ENTRIES ((BLOCKS + BLOCKS1) * PAIRS / EXPERTS)   /* of an expert */
#define EXPERT_TILES ((ENTRIES + ROWS - 1) / ROWS)
#define TILES (EXPERTS * EXPERT_TILES)
#define TASKS (TILES * (COLUMNS0 + COLUMNS1))
#define BLOCKS_MOST(r) ((r) == 0 -> BLOCKS : BLOCKS1)
#define PROCESSORS(r) ((r) == 0 -> PROCESSORS0 : PROCESSORS1)
#define SENDERS(r) ((r) == 0 -> SENDERS0 : SENDERS1)
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

/* Epochs are told as the rank sees them in whose memory they lie: of the call that it is in, of the next one, where the
 * peer may be, or older, which all compare alike. So there is no end to calls. */
#define OLD 0
#define NOW 1
#define NEXT 2
#define EPOCH(word) ((word) & 3)
#define IN_FLIGHT 4 /* added to a payload until a release, or a fence of puts, that covers it is visible */
#define UNSETTLED 8 /* added to what was put, until its reader has let the network make it visible */

/* What is left on a payload that a packet's signal announces, */
#ifdef BUG_MISSING_RELEASE /* it orders nothing; with puts: no fence before it */
#define AT_PACKET IN_FLIGHT
#elif defined(PUTS)
#define AT_PACKET UNSETTLED
#else
#define AT_PACKET 0
#endif
/* on one that a return signal does, */
#ifdef BUG_RELAXED_RETURN
#define AT_RETURN IN_FLIGHT
#else
#define AT_RETURN 0
#endif
/* and on what was put, when it has arrived. */
#ifdef BUG_NO_QUIET_RETURN /* a sender counts itself when its puts are under way */
#define AT_QUIET IN_FLIGHT
#else
#define AT_QUIET UNSETTLED
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
#define COPIES 1
#else
#define COPIES 2
#endif
/* Of two copies by the epoch's parity the first is of the call that the rank is in. */
#define COPY(epoch, copies) ((epoch) == NOW -> 0 : (copies) - 1)
#define CALL(epoch, p) (COPY(epoch, 2) * RANKS + (p))
#define PACKET(epoch, p, b) (COPY(epoch, COPIES) * PACKETS + (p) * BLOCKS + (b))
#define PART_OF(k) (((k) + 1) % PARTS) /* the part of a packet that has the row of pair k; part 0 has the entries */
#define ROW(p, b, part) (((p) * BLOCKS + (b)) * PARTS + (part))
#ifdef REDUCED
#define RETURN_ROWS RANKS       /* of a block, which counts as one token: what each rank sums */
#define UNITS (GROUPS * PIECES) /* of a return row: what is written to it at once */
#else
#define RETURN_ROWS PAIRS
#define UNITS COLUMNS1
#endif
#define UNITS_OF_GROUP (UNITS / GROUPS)
#define RETURN(b, slot, u) (((b) * RETURN_ROWS + (slot)) * UNITS + (u))
#define RETURNS (BLOCKS * RETURN_ROWS * UNITS)
#define GROUP_OF(c) ((c) * GROUPS / COLUMNS1)

#if TILES > 2 || ROWS > 2 || RETURNS > 8 || (BLOCKS + BLOCKS1) * PIECES * GROUPS > 8
#error "the options of os() and some bit sets are written out for less"
#endif

/* Pending: (row, column) products to compute, and above them the experts that have seen the source's last packet. */
#define SEEN 16
#define COMPLETE (SEEN * EXPERTS)

/* Task words: kind and index. Zero is an empty slot. */
#define GEMM0 16
#define GEMM1 32
#define STOP 48
#define KIND(w) ((w) & 48)
#define INDEX(w) ((w) & 15)

typedef Rank {
	/* Symmetric heap: written by the rank that the index names, read here. */
	byte call_epoch[2 * RANKS];
	byte call_blocks[2 * RANKS];
	byte packet_epoch[COPIES * PACKETS];
	byte packet_count[COPIES * PACKETS];
	byte entries[COPIES * PACKETS]; /* payload: epoch */
	byte entry_pairs[COPIES * PACKETS]; /* the pairs that the entries name, one bit each */
	byte rows[PACKETS * PARTS];    /* payload: epoch */
	byte return_epoch[RANKS * GROUPS]; /* [q][g] */
	byte return_rows[RETURNS];     /* payload: epoch */

	/* Own memory. */
	byte routed[RANKS * BLOCKS];   /* [q][b] pairs of own block b that rank q got */
	byte outbox[BLOCKS];           /* the packet for the other rank: which block's of this call */
	byte out_sent[BLOCKS];         /* parts of it that are sent, reset by who sends the last */
	byte consumed[EXPERTS * RANKS]; /* [x][p] packets that expert x has tiles of; one more once it has closed p */
	byte entry[EXPERTS * ENTRIES]; /* [x] entries in tile order: its i-th tile is entry[x * ENTRIES + i * ROWS ...] */
	byte filled[EXPERTS];
	byte done0[TILES];             /* dependency counters, reset by whoever completes them: of a tile's GEMM1, ... */
	byte pending[RANKS * GROUPS];  /* ... of a source's sums or, with `direct`, its return signals, ... */
	byte covered[COVERS * RANKS * GROUPS]; /* return rows whose writes the next fetch-add is ordered behind */
	byte list[TILES];              /* the ready list: tiles whose GEMM1 is ready */
	byte list_head;
	byte list_tail;
	byte queue[SLOTS];             /* the ready queue */
	byte head;                     /* tickets taken */
	byte tail;                     /* words published */
	byte published0[TILES];
	byte published1[TILES];
	byte ready1;                   /* tiles drained from the ready list, not yet published */
	bool ended;                    /* the stop words are published */
#ifdef EARLY_STOP
	byte stopped;                  /* stop words that are published */
#endif
	byte combines;                 /* pieces of Combine taken */
#ifdef REDUCED
	byte reduce_epoch[RANKS * GROUPS]; /* [p][g] all rows are computed: they can be summed */
	byte reduces[2];               /* pieces of Reduce taken, in this call and, by parity, the next one */
	byte reduce_done[RANKS * GROUPS]; /* [p][g] pieces summed: a dependency counter of the return signals */
#endif
#ifdef PUTS
	byte sums[BLOCKS * UNITS];     /* of the other rank's rows. Payload: epoch */
	byte returns_ready;            /* all of them are there: epoch */
	byte returns_sent;             /* senders that have put theirs, reset by the last */
	byte putting;                  /* senders with puts under way, which read the outbox */
#endif
	byte joining;                  /* processors that have not begun the call yet, */
	byte computing;                /* processors that have not left it, */
	byte sending;                  /* and senders */

	/* What was executed, for the assertions alone. */
	byte executed0;
	byte executed1;
	byte executed_reduce;
	byte executed_combine;
}
Rank rank[RANKS];

byte lead = NOW; /* the epoch that rank 0 is in, as rank 1 tells it */

#define me rank[r]
#define you rank[1 - r]
/* This rank's epoch, as another one tells it. */
#define THERE ((r) == 0 -> lead : 2 - lead)
#define AT(home) ((home) == r -> NOW : THERE)

/* Scratch of one atomic block; no part of the state. */
hidden byte i, j, p_, b_, g_, k_, c_, q_, id, bits, count, last, piece;

#define ANNOUNCED(p) (me.call_epoch[p] == NOW)
#define BLOCKS_OF(p) me.call_blocks[p]
#define ARRIVED(p, b) (me.packet_epoch[PACKET(NOW, p, b)] == NOW)
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
#define PUBLISHED(t) (!TILE_READY(t) || me.published0[t] == COLUMNS0 && me.published1[t] == COLUMNS1)
/* Of a rank with several processors one stops early, as soon as a GEMM1 task is published. */
#ifdef BUG_ALL_EARLY /* or all of them */
#define EARLY_STOPS(r) PROCESSORS(r)
#else
#define EARLY_STOPS(r) (PROCESSORS(r) > 1 -> 1 : 0)
#endif
#ifdef EARLY_STOP
#define STOPPED me.stopped
#else
#define STOPPED 0
#endif
#ifdef BUG_LOST_TERMINATION /* a processor without its stop word */
#define STOPS_OF(r) (PROCESSORS(r) - 1)
#else
#define STOPS_OF(r) PROCESSORS(r)
#endif
#define ALL_PUBLISHED (SEEN_ALL(0) && SEEN_ALL(1) && ALL_CLOSED(0) \
	&& ALL_CLOSED((EXPERTS_OF(r) == 0 -> 0 : EXPERTS - 1)) && PUBLISHED(0) && PUBLISHED(TILES - 1))

#define ALL_PAIRS ((1 << PAIRS) - 1)
#define ROUTED(q, b) me.routed[(q) * BLOCKS + (b)]
#ifdef BUG_SHARED_OUTBOX /* all blocks are built in one place */
#define OUT(b) 0
#else
#define OUT(b) (b)
#endif
#define MADE(b) (1 + (b)) /* this call's packet of block b; zero: of an older call */

/* Group g has come from every rank. */
#ifdef BUG_EARLY_COMBINE /* the last rank is not asked */
#define RETURNED(g) (me.return_epoch[g] == NOW)
#else
#define RETURNED(g) (me.return_epoch[g] == NOW && me.return_epoch[GROUPS + (g)] == NOW)
#endif
#define ALL_RETURNED (BLOCKS_OF(r) == 0 || RETURNED(0) && RETURNED(GROUPS - 1))

/* Pieces of Combine, in the order of their tickets: block t % blocks of group t / blocks. */
#define COMBINES (BLOCKS_OF(r) * GROUPS)
#define COMBINE_GROUP(t) ((t) / BLOCKS_OF(r))
#define COMBINE_BLOCK(t) ((t) % BLOCKS_OF(r))
#ifdef BUG_FIRST_GROUP /* one group's signals are taken for all groups' */
#define COMBINABLE(t) ((t) < COMBINES && RETURNED(0))
#else
#define COMBINABLE(t) ((t) < COMBINES && RETURNED(COMBINE_GROUP(t)))
#endif

/* Pieces of Reduce, in the order of their tickets: group by group, in each the other rank's blocks before the own. How
 * many they are a processor knows when it has heard both ranks. */
#define TICKETS me.reduces[0]
#define HEARD (ANNOUNCED(0) && ANNOUNCED(1))
#define PIECES_OF(p) (BLOCKS_OF(p) * PIECES)
#define PIECES_OF_GROUP (PIECES_OF(0) + PIECES_OF(1))
#define REDUCES (HEARD && EXPERTS_OF(r) > 0 -> PIECES_OF_GROUP * GROUPS : 0)
#define REDUCE_GROUP(t) ((t) / PIECES_OF_GROUP)
#define REDUCE_SOURCE(t) ((t) % PIECES_OF_GROUP < PIECES_OF(1 - r) -> 1 - r : r)
#define REDUCE_PIECE(t) ((t) % PIECES_OF_GROUP - ((t) % PIECES_OF_GROUP < PIECES_OF(1 - r) -> 0 : PIECES_OF(1 - r)))
#define TAKEN_ALL 15 /* what is left in the counter of a call that is over: no less than its pieces */
#ifdef BUG_EARLY_REDUCE /* one source's rows are taken for all sources' */
#define SUMMABLE(t) ((t) < REDUCES && me.reduce_epoch[(1 - r) * GROUPS + REDUCE_GROUP(t)] == NOW)
#else
#define SUMMABLE(t) ((t) < REDUCES && me.reduce_epoch[REDUCE_SOURCE(t) * GROUPS + REDUCE_GROUP(t)] == NOW)
#endif

/* Behind the last word; its slot was taken and cleared long ago. */
inline publish(word) {
	assert(me.queue[me.tail % SLOTS] == 0);
	me.queue[me.tail % SLOTS] = word;
	me.tail++
}

/* A payload must be of this call, and a release that covers its write must have been seen. */
#define check(payload) assert((payload) == NOW)

/* A call of a rank is over and the next one begins: what its heap has of the next call is of this one now. */
#define exchange(x, y) j = x; x = y; y = j
#define age(word) word = (EPOCH(word) == OLD -> word : word - 1)
inline pass() {
	for (i : 0 .. RANKS * GROUPS - 1) {
		age(me.return_epoch[i])
	}
	for (i : 0 .. RETURNS - 1) {
		age(me.return_rows[i])
	}
	for (i : 0 .. PACKETS * PARTS - 1) {
		age(me.rows[i])
	}
	for (i : 0 .. RANKS - 1) {
		me.call_epoch[i] = me.call_epoch[RANKS + i];
		age(me.call_epoch[i]);
		me.call_blocks[i] = me.call_blocks[RANKS + i];
		me.call_epoch[RANKS + i] = OLD;
		me.call_blocks[RANKS + i] = 0
	}
#if COPIES == 2
	for (i : 0 .. PACKETS - 1) {
		exchange(me.packet_epoch[i], me.packet_epoch[PACKETS + i]);
		exchange(me.packet_count[i], me.packet_count[PACKETS + i]);
		exchange(me.entries[i], me.entries[PACKETS + i]);
		exchange(me.entry_pairs[i], me.entry_pairs[PACKETS + i])
	}
#endif
	for (i : 0 .. COPIES * PACKETS - 1) {
		age(me.packet_epoch[i]);
		me.packet_count[i] = (me.packet_epoch[i] == OLD -> 0 : me.packet_count[i]);
		age(me.entries[i]);
		me.entry_pairs[i] = (me.entries[i] == OLD -> 0 : me.entry_pairs[i])
	}
#ifdef REDUCED
	exchange(me.reduces[0], me.reduces[1])
#endif
}

/* A call begins, with any number of blocks, announces itself to the rank's own actors and clears the next call's
 * tickets, which nobody uses in this one. No peer is two calls away. */
inline begin_call() {
	select(blocks : 0 .. BLOCKS_MOST(r));
	d_step {
		pass();
		lead = (r == 0 -> lead + 1 : lead - 1);
		assert(lead <= NEXT);
		me.call_blocks[r] = blocks;
		me.call_epoch[r] = NOW;
#if defined(REDUCED) && !defined(BUG_WRONG_PARITY)
		me.reduces[1] = 0;
#endif
		me.joining = (1 << PROCESSORS(r)) - 1;
		me.computing = (1 << PROCESSORS(r)) - 1;
		me.sending = (1 << SENDERS(r)) - 1;
#ifdef BUG_EAGER_RETURN /* a rank without experts says at once that it owes nothing */
		for (q_ : 0 .. RANKS - 1) {
			for (i : 0 .. GROUPS - 1) {
				j = r * GROUPS + i;
				rank[q_].return_epoch[j] = (EXPERTS_OF(r) == 0 -> AT(q_) : rank[q_].return_epoch[j])
			}
		}
#endif
		blocks = 0
	}
}

inline count_bits(set) {
	count = 0;
	for (k_ : 0 .. PAIRS - 1) {
		count = count + (((set) >> k_) & 1)
	}
}

/* The own packet of block b, by its routing: complete as it is, since own rows are read from the input. */
inline signal_own_packet(b) {
	j = PACKET(NOW, r, b);
	count_bits(ROUTED(r, b));
	if
	:: count > 0 ->
		me.entry_pairs[j] = ROUTED(r, b);
		me.entries[j] = NOW
	:: else
	fi;
	me.packet_count[j] = count;
	me.packet_epoch[j] = NOW
}

/* The other rank's packet of block b, without its rows. */
inline build_packet(b) {
#ifdef PUTS
	assert(!((me.putting >> ((b) % SENDERS(r))) & 1));
#endif
	me.outbox[OUT(b)] = MADE(b)
}

/* To the peer; the first sender does it. */
inline announce_to_peer() {
	you.call_blocks[CALL(THERE, r)] = BLOCKS_OF(r);
	you.call_epoch[CALL(THERE, r)] = THERE
}

/* The packet is complete: the signal releases what its sender knows of. A part's number says who sent it. */
#ifdef BUG_RELAXED_SENT /* the count of parts orders nothing */
#define SENDER_KNOWS(part) ((b_ * PARTS + (part)) % SENDERS(r) == n)
#else
#define SENDER_KNOWS(part) true
#endif
#define release(payload, epoch, left) payload = (payload == epoch + IN_FLIGHT -> epoch + left : payload)
#define LEFT(part) (SENDER_KNOWS(part) -> AT_PACKET : IN_FLIGHT)
inline signal_packet() {
	release(you.entries[j], THERE, LEFT(0));
	for (k_ : 0 .. PARTS - 1) {
		release(you.rows[ROW(r, b_, k_)], THERE, LEFT(k_))
	}
	count_bits(bits);
	you.packet_count[j] = count;
	you.packet_epoch[j] = THERE
}

/* Copies a part of the packet of a block, and counts it; who counts the last one signals. */
inline send_part(part) {
	b_ = (part) / PARTS;
	assert(me.outbox[OUT(b_)] == MADE(b_));
	bits = ROUTED(1 - r, b_);
	j = PACKET(THERE, r, b_);
	if
	:: (part) % PARTS == 0 && bits != 0 ->
		you.entry_pairs[j] = bits;
		you.entries[j] = THERE + IN_FLIGHT
	:: else /* an empty packet: neither rows nor entries */
	fi;
	for (k_ : 0 .. PAIRS - 1) {
		if
		:: ((bits >> k_) & 1) && PART_OF(k_) == (part) % PARTS ->
			you.rows[ROW(r, b_, PART_OF(k_))] = THERE + IN_FLIGHT
		:: else
		fi
	}
#ifdef PUTS
	me.putting = me.putting | (1 << n);
#endif
	me.out_sent[b_]++;
#ifdef BUG_LAST_PART /* who copies the last of the parts signals, the others copied or not */
	last = (part) % PARTS == PARTS - 1;
#else
	last = me.out_sent[b_] == PARTS;
#endif
#ifndef BUG_SENT_KEPT
	me.out_sent[b_] = (me.out_sent[b_] == PARTS -> 0 : me.out_sent[b_]);
#endif
	if
	:: last -> signal_packet()
	:: else
	fi
}

/* The group's rows are at their home: the signal releases what its sender knows of. (Puts: the peer's lie here.) */
inline signal_return(home, g) {
#ifdef PUTS
	if
	:: home != r -> me.returns_ready = NOW
	:: else ->
#endif
	for (k_ : 0 .. RETURNS - 1) {
		if
		:: (me.COVERED(home, g) >> k_) & 1 -> release(rank[home].return_rows[k_], AT(home), AT_RETURN)
		:: else
		fi
	}
	for (k_ : 0 .. COVERS - 1) {
		me.covered[(k_ * RANKS + home) * GROUPS + g] = 0
	}
	rank[home].return_epoch[r * GROUPS + g] = AT(home)
#ifdef PUTS
	fi
#endif
}

/* All rows of source p in group g are computed. */
inline complete(p, g) {
#ifdef REDUCED
	me.reduce_epoch[(p) * GROUPS + (g)] = NOW;
#ifdef BUG_EARLY_READY /* the senders are told of rows that are not summed */
	me.returns_ready = NOW;
#endif
#endif
#if !defined(REDUCED) || defined(BUG_UNSUMMED) /* or as if there was nothing to sum */
	signal_return(p, g)
#endif
}

/* A counter changes; if it is complete now, whoever changed it resets it. */
inline change_pending(p, g, change) {
	me.pending[(p) * GROUPS + (g)] = me.pending[(p) * GROUPS + (g)] + change;
	last = me.pending[(p) * GROUPS + (g)] == COMPLETE;
#ifndef BUG_COUNTER_KEPT
	if
	:: last -> me.pending[(p) * GROUPS + (g)] = 0
	:: else
	fi;
#endif
	if
	:: last -> complete(p, g)
	:: else
	fi
}

/* Expert x has seen source p's last packet. */
inline close(x, p) {
	for (i : 0 .. GROUPS - 1) {
		change_pending(p, i, SEEN)
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

/* Who has seen a signal lets the network make visible what was put before it. */
#if defined(PUTS) && !defined(BUG_NO_SETTLE)
#define settle(payload) payload = (payload) & ~UNSETTLED
#else
#define settle(payload) skip
#endif

/* What the next packet of source p has for expert x enters its tiles. */
inline consume(x, p) {
	j = PACKET(NOW, p, CONSUMED(x, p));
	settle(me.entries[j]);
	settle(me.rows[ROW(p, CONSUMED(x, p), 0)]);
#ifdef BUG_EARLY_CLOSE /* the source is closed before the rows of its last packet are added */
	if
	:: CONSUMED(x, p) + 1 == BLOCKS_OF(p) -> close(x, p)
	:: else
	fi;
#endif
	if
	:: me.packet_count[j] > 0 ->
		check(me.entries[j]);
		for (c_ : 0 .. PAIRS - 1) {
			if
			:: c_ % EXPERTS == x && ((me.entry_pairs[j] >> c_) & 1) ->
				for (i : 0 .. COLUMNS1 - 1) {
					me.pending[p * GROUPS + GROUP_OF(i)]++
				}
				me.entry[x * ENTRIES + me.filled[x]] = (p * BLOCKS + CONSUMED(x, p)) * PAIRS + c_;
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
			:: p_ != r -> check(me.rows[ROW(p_, b_, PART_OF(k_))])
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

/* A task or piece is executed, for the first time. */
inline once(done, task) {
	assert(!((done >> (task)) & 1));
	done = done | (1 << (task))
}

/* A return row is written at its home; the writer knows of it. */
inline write_return(home, b, slot, u) {
	j = RETURN(b, slot, u);
	assert(rank[home].return_rows[j] != AT(home) && rank[home].return_rows[j] < IN_FLIGHT);
	rank[home].return_rows[j] = AT(home) + IN_FLIGHT;
	me.COVERED(home, (u) / UNITS_OF_GROUP) = me.COVERED(home, (u) / UNITS_OF_GROUP) | (1 << j)
}

inline retire_gemm0(t) {
	me.done0[t]++;
	if
	:: me.done0[t] == COLUMNS0 ->
		me.done0[t] = 0;
		push = GEMM1 + t;
		position = me.list_tail;
		me.list_tail++
	:: else
	fi
}

/* `direct` writes the rows home; `reduced` has them staged here. */
inline retire_gemm1(t, c) {
	for (i : 0 .. ROWS - 1) {
		if
		:: HAS(t, i) ->
			read_entry(t, i);
#ifndef REDUCED
			write_return(p_, b_, k_, c);
#endif
			change_pending(p_, GROUP_OF(c), -1)
		:: else
		fi
	}
}

inline execute() {
	if
	:: KIND(word) == GEMM0 ->
		once(me.executed0, INDEX(word));
		read_gemm0(INDEX(word) / COLUMNS0);
		retire_gemm0(INDEX(word) / COLUMNS0);
		word = 0
	:: KIND(word) == GEMM1 ->
		once(me.executed1, INDEX(word));
		read_gemm1(INDEX(word) / COLUMNS1);
		retire_gemm1(INDEX(word) / COLUMNS1, INDEX(word) % COLUMNS1);
		word = 0
	:: word == STOP /* it keeps the word until it leaves */
	fi
}

#ifdef REDUCED
/* Sums the rows of source p_'s block b_ in the columns of group g_; of an empty packet there are none. */
inline read_staged() {
	j = PACKET(NOW, p_, b_);
	if
	:: me.packet_count[j] > 0 -> check(me.entries[j])
	:: else
	fi;
	last = p_ * BLOCKS + b_; /* read_entry names another */
	count = 0;
	for (q_ : 0 .. TILES - 1) {
		for (i : 0 .. ROWS - 1) {
			if
			:: HAS(q_, i) && me.entry[q_ / EXPERT_TILES * ENTRIES + q_ % EXPERT_TILES * ROWS + i] / PAIRS == last ->
				for (c_ : 0 .. COLUMNS1 - 1) {
					assert(GROUP_OF(c_) != g_ || ((me.executed1 >> (q_ * COLUMNS1 + c_)) & 1))
				}
				count++
			:: else
			fi
		}
	}
	assert(count == me.packet_count[j])
}

/* The piece with this ticket: summed, written, counted. Who counts the last of a source's group signals. */
inline reduce(t) {
	p_ = REDUCE_SOURCE(t);
	b_ = REDUCE_PIECE(t) / PIECES;
	g_ = REDUCE_GROUP(t);
	read_staged();
	once(me.executed_reduce, t);
	k_ = g_ * PIECES + REDUCE_PIECE(t) % PIECES;
	if
	:: me.packet_count[PACKET(NOW, p_, b_)] == 0
#ifdef PUTS
	:: me.packet_count[PACKET(NOW, p_, b_)] > 0 && p_ != r -> me.sums[b_ * UNITS + k_] = NOW
	:: me.packet_count[PACKET(NOW, p_, b_)] > 0 && p_ == r -> write_return(p_, b_, r, k_)
#else
	:: else -> write_return(p_, b_, r, k_)
#endif
	fi;
	id = p_ * GROUPS + g_;
	me.reduce_done[id]++;
#ifdef BUG_LAST_TICKET /* who sums the piece with the last ticket signals, the others summed or not */
	last = REDUCE_PIECE(t) == PIECES_OF(p_) - 1;
#else
	last = me.reduce_done[id] == PIECES_OF(p_);
#endif
#ifndef BUG_DONE_KEPT
	me.reduce_done[id] = (me.reduce_done[id] == PIECES_OF(p_) -> 0 : me.reduce_done[id]);
#endif
	if
	:: last -> signal_return(p_, g_)
	:: else
	fi
}
#endif

inline read_combine(b, g) {
	for (k_ : 0 .. RETURN_ROWS - 1) {
		for (c_ : (g) * UNITS_OF_GROUP .. (g) * UNITS_OF_GROUP + UNITS_OF_GROUP - 1) {
#ifdef REDUCED
			settle(me.return_rows[RETURN(b, k_, c_)]);
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

inline combine(t) {
	read_combine(COMBINE_BLOCK(t), COMBINE_GROUP(t));
	once(me.executed_combine, t)
}

#ifdef PUTS
/* Puts one sender's share of the sums for the peer, waits for them, and counts; who counts the last one signals. */
inline send_returns() {
	for (i : 0 .. BLOCKS_OF(1 - r) * UNITS - 1) {
		if
		:: i < BLOCKS_OF(1 - r) * UNITS && i % SENDERS(r) == n &&
			me.packet_count[PACKET(NOW, 1 - r, i / UNITS)] > 0 ->
			check(me.sums[i]);
			j = RETURN(i / UNITS, r, i % UNITS);
			assert(you.return_rows[j] != THERE && you.return_rows[j] < IN_FLIGHT);
			you.return_rows[j] = THERE + AT_QUIET
		:: else
		fi
	}
	me.returns_sent++;
	if
	:: me.returns_sent == SENDERS(r) ->
#ifndef BUG_RETURNS_SENT_KEPT
		me.returns_sent = 0;
#endif
		you.return_epoch[r * GROUPS] = THERE
	:: else
	fi
}
#endif

/* The kernel ends. Nothing was cleared, and nothing needs to be. (What is set to zero here means nothing to later
 * calls: so ended calls do not differ.) */
inline end_call() {
	for (i : 0 .. TILES - 1) {
		assert(((me.executed0 >> (i * COLUMNS0)) & ((1 << COLUMNS0) - 1)) == (USED(i) -> (1 << COLUMNS0) - 1 : 0));
		assert(((me.executed1 >> (i * COLUMNS1)) & ((1 << COLUMNS1) - 1)) == (USED(i) -> (1 << COLUMNS1) - 1 : 0))
	}
	assert(me.executed_combine == (1 << COMBINES) - 1);
	assert(me.head == me.tail && me.list_head == me.list_tail && me.ready1 == 0);
	for (i : 0 .. SLOTS - 1) {
		assert(me.queue[i] == 0)
	}
	for (i : 0 .. RANKS * GROUPS - 1) {
		assert(me.pending[i] == 0)
	}
	for (i : 0 .. COVERS * RANKS * GROUPS - 1) {
		assert(me.covered[i] == 0)
	}
#ifdef REDUCED
	assert(me.executed_reduce == (1 << REDUCES) - 1);
	for (i : 0 .. RANKS * GROUPS - 1) {
		assert(me.reduce_done[i] == 0);
		me.reduce_epoch[i] = OLD
	}
	TICKETS = TAKEN_ALL;
#endif
#ifdef PUTS
	assert(me.returns_sent == 0);
	me.returns_ready = OLD;
	for (i : 0 .. BLOCKS * UNITS - 1) {
		me.sums[i] = OLD
	}
#endif
	for (i : 0 .. BLOCKS - 1) {
		assert(me.out_sent[i] == 0);
		me.outbox[i] = 0
	}
	for (i : 0 .. TILES - 1) {
		assert(me.done0[i] == 0);
		assert(me.list[i] == 0);
		me.published0[i] = 0;
		me.published1[i] = 0
	}
	for (i : 0 .. EXPERTS * ENTRIES - 1) {
		me.entry[i] = 0
	}
	for (i : 0 .. EXPERTS - 1) {
		me.filled[i] = 0
	}
	me.head = 0; /* all slots are zero, so where the rings start is of no consequence */
	me.tail = 0;
	me.list_head = 0;
	me.list_tail = 0;
	me.combines = 0;
	me.ended = false;
#ifdef EARLY_STOP
	me.stopped = 0;
#endif
	me.executed0 = 0;
	me.executed1 = 0;
	me.executed_reduce = 0;
	me.executed_combine = 0;
	for (i : 0 .. EXPERTS * RANKS - 1) {
		me.consumed[i] = 0
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

#ifdef BUG_SENDERS_BEHIND /* a call ends although its senders have not */
#define SENDERS_LEFT true
#else
#define SENDERS_LEFT (me.sending == 0)
#endif

proctype os(byte r) {
	byte blocks;
#ifdef BUG_WRONG_PARITY /* it clears the tickets of this call, a step behind the begin of it */
	bool cleared;
#endif
#ifdef BUG_RELAXED_COUNTER
	byte n = STOPS;
#endif
	atomic { begin_call() }
	do
#ifdef BUG_WRONG_PARITY
	:: d_step { !cleared -> TICKETS = 0; cleared = true }
#endif
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
			me.list[me.list_head % TILES] != 0 ->
			me.ready1 = me.ready1 | (1 << INDEX(me.list[me.list_head % TILES]));
			me.list[me.list_head % TILES] = 0;
			me.list_head++
		}
	:: PUBLISH0(0)
	:: PUBLISH1(0)
#if TILES > 1
	:: PUBLISH0(1)
	:: PUBLISH1(1)
#endif
#ifdef EARLY_STOP
	:: d_step {
			!me.ended && me.stopped == 0 && me.published1[0] != 0 && EARLY_STOPS(r) != 0 ->
			for (i : 1 .. EARLY_STOPS(r)) {
				publish(STOP)
			}
			me.stopped = EARLY_STOPS(r)
		}
#endif
	:: d_step {
			ALL_PUBLISHED && !me.ended ->
			for (i : STOPPED + 1 .. STOPS_OF(r)) {
				publish(STOP)
			}
			me.ended = true
		}
	:: me.ended && ALL_RETURNED && me.computing == 0 && SENDERS_LEFT ->
progress:
		atomic {
			d_step { end_call() };
#ifdef BUG_WRONG_PARITY
			cleared = false;
#endif
			begin_call()
		}
	od
}

/* What a sender begins with: the first one announces the call before its first part. */
#define FIRST_PART (n == 0 -> NONE : n)
#define SENDS ((me.sending >> n) & 1)
#define ALL_SENT (part != NONE && part >= BLOCKS_OF(r) * PARTS)

/* The sender is through. What it has put has arrived: the next call may overwrite what its puts read. */
inline leave() {
	me.sending = me.sending & ~(1 << n);
	part = FIRST_PART;
#if defined(PUTS) && !defined(BUG_NO_QUIET)
	me.putting = me.putting & ~(1 << n)
#endif
}

inline leave_if_done() {
#ifdef PUTS
	skip /* returns follow */
#else
	if
	:: ALL_SENT -> leave()
	:: else
	fi
#endif
}

/* The first sender announces the call to the peer, as early as it may. Then each sends its parts of the call's packets,
 * in order, and with puts its share of what this rank owes to the peer. */
proctype sender(byte r, n) {
	byte part = FIRST_PART;

	do
	:: d_step {
			SENDS && part == NONE ->
			announce_to_peer();
			part = 0;
			leave_if_done()
		}
	:: d_step { /* the own packet says that the block's routing and packets are written */
			SENDS && part < BLOCKS_OF(r) * PARTS && ARRIVED(r, part / PARTS) ->
			send_part(part);
			part = part + SENDERS(r);
			leave_if_done()
		}
#ifdef PUTS
	:: d_step {
			SENDS && ALL_SENT && ANNOUNCED(1 - r) && (BLOCKS_OF(1 - r) == 0 || me.returns_ready == NOW) ->
			if
			:: BLOCKS_OF(1 - r) > 0 -> send_returns()
			:: else /* it awaits nothing */
			fi;
			leave()
		}
#else
	:: d_step { SENDS && part != 0 && ALL_SENT -> leave() } /* it had none */
#endif
	od
}

#define ASK(own) own = me.head; me.head++
#define WORD me.queue[ticket % SLOTS]

/* The piece that a processor has taken. A rank's only one takes it when it can be done: nobody sees when it did. Combine
 * has one counter, too, as for the workers of one processor; only the call's end depends on it, whoever does it. */
#define TAKES_AHEAD (PROCESSORS(r) > 1)
#define TAKEN(own, tickets) (TAKES_AHEAD -> own : tickets)
#define TAKE(own, tickets, all) \
	d_step { TAKES_AHEAD && push == 0 && own == NONE && tickets < all -> own = tickets; tickets++ }
#define DONE(own, tickets) tickets = (TAKES_AHEAD -> tickets : tickets + 1); own = NONE
/* Whether a processor takes pieces of Reduce: where some stop early, only behind the stop word. */
#ifdef EARLY_STOP
#define REDUCING (word == STOP)
#else
#define REDUCING true
#endif
#if defined(BUG_DROPPED_PIECE) || !defined(REDUCED) /* a processor leaves with the stop word, whatever it has taken */
#define ALL_SUMMED true
#else
#define ALL_SUMMED (summing == NONE && TICKETS >= REDUCES)
#endif

/* Dispatches its blocks, then takes and executes tasks until it takes a stop word. Between tasks, and then until there
 * are none left, it takes pieces of Reduce and Combine, and does those that are ready. */
proctype processor(byte r, n) {
	byte block = n;
	byte to0, to1;
	byte ticket = NONE; /* of its task: one under way is no different from one that it has not begun */
	byte ahead = NONE;  /* of the task behind that one, taken while it is under way */
	byte word;
	byte push;     /* an item for the ready list, ... */
	byte position; /* ... and its reserved place there */
#ifdef REDUCED
	byte summing = NONE; /* the piece that it has taken, one of each kind */
#endif
	byte combining = NONE;

	do
	:: atomic {
			((me.joining >> n) & 1) ->
			me.joining = me.joining & ~(1 << n);
			do
			:: block < BLOCKS_OF(r) ->
				select(to0 : 0 .. ALL_PAIRS);
				select(to1 : 0 .. (EXPERTS_OF(1) == 0 -> 0 : ALL_PAIRS));
				ROUTED(0, block) = to0;
				d_step {
					ROUTED(1, block) = to1 & ~to0;
#ifndef BUG_EARLY_OWN
					build_packet(block);
#endif
					signal_own_packet(block);
					block = block + PROCESSORS(r)
				}
			:: else -> break
			od;
			block = n;
			to0 = 0;
			to1 = 0
		}
#ifdef BUG_EARLY_OWN /* what the senders read is written behind the signal that they wait for */
		d_step {
			for (i : 0 .. BLOCKS - 1) {
				if
				:: i % PROCESSORS(r) == n && i < BLOCKS_OF(r) -> build_packet(i)
				:: else
				fi
			}
		}
#endif
		do
		:: d_step {
				push != 0 ->
				assert(me.list[position % TILES] == 0);
				me.list[position % TILES] = push;
				push = 0;
				position = 0
			}
		:: d_step { push == 0 && word != STOP && ticket == NONE -> ASK(ticket) }
		:: d_step { ticket != NONE && ahead == NONE && WORD != 0 && WORD != STOP -> ASK(ahead) }
		:: d_step {
				push == 0 && ticket != NONE && WORD != 0 ->
				word = WORD;
				WORD = 0;
				ticket = ahead;
				ahead = NONE;
				execute()
			}
#ifdef REDUCED
#if STOPS > 1
		:: TAKE(summing, TICKETS, (REDUCING -> REDUCES : 0))
#endif
		:: d_step {
				push == 0 && REDUCING && SUMMABLE(TAKEN(summing, TICKETS)) ->
				piece = TAKEN(summing, TICKETS);
				reduce(piece);
				DONE(summing, TICKETS)
			}
#endif
#if STOPS > 1
		:: TAKE(combining, me.combines, COMBINES)
#endif
		:: d_step {
				push == 0 && COMBINABLE(TAKEN(combining, me.combines)) ->
				piece = TAKEN(combining, me.combines);
				combine(piece);
				DONE(combining, me.combines)
			}
		:: d_step {
				word == STOP && ALL_SUMMED && combining == NONE && me.combines >= COMBINES ->
				word = 0;
				me.computing = me.computing & ~(1 << n)
			}
			break
		od
	od
}

init {
	byte n;
	atomic {
		run os(0);
		run os(1);
		for (n : 0 .. PROCESSORS0 - 1) {
			run processor(0, n)
		}
		for (n : 0 .. PROCESSORS1 - 1) {
			run processor(1, n)
		}
		for (n : 0 .. SENDERS0 - 1) {
			run sender(0, n)
		}
		for (n : 0 .. SENDERS1 - 1) {
			run sender(1, n)
		}
	}
}
