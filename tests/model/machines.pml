/*
 * Once per machine (docs/protocol.md), for Spin: source 0 on a machine of its own, ranks 1 and 2 on another, of which 1 is
 * its relay. The source's batches go to the relay, which passes each on, row and signal, to itself and to rank 2; what the
 * two have computed goes home by itself or, with SUMS, as one sum that the relay forms of theirs. flashmoe.pml has what
 * ranks do within a call; here a rank computes a batch in one step, and only the source has tokens.
 *
 * Epochs are numbers, of CALLS calls. A step that writes to a heap and signals does both at once: see flashmoe.pml.
 */

#ifndef CALLS
#define CALLS 4
#endif
#ifndef BATCHES
#define BATCHES 2 /* of a call, at most; each call chooses how many it has, 0 included */
#endif

#define SOURCE 0
#define RELAY 1
#define OTHER 2
#define RANKS 3
#define PLACE(r) ((r) - 1)
#define NEEDS(set, r) (((set) >> PLACE(r)) & 1)
#define COPY(epoch, b) (((epoch) & 1) * BATCHES + (b)) /* of what is read without an answer: two, by parity */

byte epoch[RANKS];  /* the call that each is in */
byte blocks[2];     /* call_signal's payload, by parity: the source's batches */
byte announced[2];  /* call_signal of the source: epoch */

/* The relay's heap. Payload: epoch. */
byte relay_signal[BATCHES];
byte relay_needs[BATCHES]; /* counts: which ranks need the row, a bit each */
byte sum[2 * BATCHES];     /* [place][b] */
byte sum_signal[2];        /* [place] */
/* Heaps of both ranks of the machine, [place]. */
byte row[2 * BATCHES];
byte packet_signal[4 * BATCHES]; /* [place][parity][b] */
byte packet_needs[4 * BATCHES];  /* whether the packet has entries */
#define ROW(r, b) row[PLACE(r) * BATCHES + (b)]
#define SIGNAL(r, e, b) packet_signal[PLACE(r) * 2 * BATCHES + COPY(e, b)]
#define ENTRIES(r, e, b) packet_needs[PLACE(r) * 2 * BATCHES + COPY(e, b)]
/* The source's heap. */
byte return_row[2 * BATCHES]; /* [slot][b] */
byte return_signal[2];        /* [place] */

byte passed;        /* batches that the relay has passed on in its call, to all */
byte passed_to;     /* ranks that the next one has been passed on to */
byte needs[BATCHES]; /* the source's routing */

#define HEARD(e) (announced[(e) & 1] == (e))
#define BLOCKS(e) blocks[(e) & 1]
/* Nobody ends a call that another has not begun. */
#define ALL_IN(e) (epoch[0] >= (e) && epoch[1] >= (e) && epoch[2] >= (e))

#ifdef BUG_RELAY_BEHIND /* a rank ends a call although its relay has not passed on everything */
#define RELAYED true
#else
#define RELAYED (r != RELAY || passed == BLOCKS(e))
#endif
#ifdef BUG_OLD_BATCH /* the relay takes an older call's batch for this one's */
#define ARRIVED(b) (relay_signal[b] != 0)
#else
#define ARRIVED(b) (relay_signal[b] == epoch[RELAY])
#endif

inline check(payload, e) {
	assert(payload == e)
}

proctype source() {
	byte e, b, n, who;
	do
	:: e < CALLS ->
		atomic {
			select(n : 0 .. BATCHES);
			e++;
			epoch[SOURCE] = e;
			blocks[e & 1] = n;
			announced[e & 1] = e;
			b = 0
		}
		do
		:: atomic {
				b < n ->
				select(who : 0 .. 3);
				needs[b] = who;
				who = 0;
				if
				:: needs[b] != 0 -> ROW(RELAY, b) = e
				:: else
				fi;
				relay_needs[b] = needs[b];
				relay_signal[b] = e;
				b++
			}
		:: else -> break
		od;
		/* Combine. */
#ifdef SUMS
		n == 0 || return_signal[PLACE(RELAY)] == e;
#else
		n == 0 || return_signal[0] == e && return_signal[1] == e;
#endif
		d_step {
			for (b : 0 .. BATCHES - 1) {
				if
				:: b < n && needs[b] != 0 ->
#ifdef SUMS
					check(return_row[b], e)
#else
					assert(!NEEDS(needs[b], RELAY) || return_row[b] == e);
					assert(!NEEDS(needs[b], OTHER) || return_row[BATCHES + b] == e)
#endif
				:: else
				fi;
				needs[b] = 0
			}
			b = 0
		}
		ALL_IN(e)
	:: e == CALLS -> break
	od
}

/* Passes on: the row, then what it means, then that rank's signal. Runs beside the actors of its rank. */
proctype relay() {
	byte r, e;
	bool has;
	do
	:: atomic {
			epoch[RELAY] > 0 && HEARD(epoch[RELAY]) && passed < BLOCKS(epoch[RELAY]) && ARRIVED(passed) ->
			e = epoch[RELAY];
			r = RELAY + passed_to;
			has = NEEDS(relay_needs[passed], r)
		}
#ifdef BUG_SIGNAL_FIRST /* the signal overtakes the row that it announces */
		d_step { ENTRIES(r, e, passed) = has; SIGNAL(r, e, passed) = e }
#endif
		d_step {
			if
			:: has && r != RELAY -> /* the relay's own is in its place */
#ifndef BUG_OLD_BATCH
				check(ROW(RELAY, passed), e);
#endif
				ROW(r, passed) = ROW(RELAY, passed)
			:: else
			fi
		}
		d_step {
#ifndef BUG_SIGNAL_FIRST
			ENTRIES(r, e, passed) = has;
			SIGNAL(r, e, passed) = e;
#endif
			passed_to++;
			if
			:: passed_to == 2 -> passed_to = 0; passed++
			:: else
			fi
		}
	:: epoch[RELAY] == CALLS && HEARD(CALLS) && passed == BLOCKS(CALLS) -> break
	od
}

/* A rank of the machine, but for its relay. */
proctype rank(byte r) {
	byte e, b;
	do
	:: e < CALLS ->
		d_step {
			e++;
			epoch[r] = e;
			passed = (r == RELAY -> 0 : passed)
		}
		atomic { HEARD(e); b = 0 }
		do
		:: d_step { /* a task, and what it makes */
				b < BLOCKS(e) && SIGNAL(r, e, b) == e ->
				if
				:: ENTRIES(r, e, b) ->
					check(ROW(r, b), e);
#ifdef SUMS
					sum[PLACE(r) * BATCHES + b] = e
#else
					return_row[PLACE(r) * BATCHES + b] = e
#endif
				:: else
				fi;
				b++
			}
		:: b == BLOCKS(e) -> break
		od;
		if
		:: BLOCKS(e) > 0 ->
#ifdef SUMS
			sum_signal[PLACE(r)] = e;
			if
			:: r == RELAY ->
#ifdef BUG_EARLY_SUM /* of the own rank's sums alone */
				sum_signal[0] == e;
#else
				sum_signal[0] == e && sum_signal[1] == e;
#endif
				d_step {
					for (b : 0 .. BATCHES - 1) {
						if
						:: b < BLOCKS(e) && relay_needs[b] != 0 ->
							assert(!NEEDS(relay_needs[b], RELAY) || sum[b] == e);
							assert(!NEEDS(relay_needs[b], OTHER) || sum[BATCHES + b] == e);
							return_row[b] = e
						:: else
						fi
					}
					return_signal[PLACE(RELAY)] = e
				}
			:: else
			fi
#else
			return_signal[PLACE(r)] = e
#endif
		:: else
		fi;
		ALL_IN(e) && RELAYED
	:: e == CALLS -> break
	od
}

init {
	atomic {
		run source();
		run relay();
		run rank(RELAY);
		run rank(OTHER)
	}
}
