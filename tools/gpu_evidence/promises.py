"""What README.md and the pages of docs/ promise, and the tests that show it.

Promises of speed are not in the list, because speed is measured and not tested. Pages that only explain or measure have
no promises here. tests/test_cuda_host.py runs the cases of tests/fake_driver/, `make test-cpp` the files of tests/cpp/,
and `make wheel` those of tests/release/.
"""

from __future__ import annotations

from typing import NamedTuple


class Promise(NamedTuple):
    says: str
    """The promise, in one short sentence that docs/evidence.md prints."""
    page: str
    """The page that makes the promise, as a path from the root."""
    quote: str
    """Words of that page, as they stand there. A test checks that the page still has them."""
    tests: tuple[str, ...]
    """The tests that show the promise: paths from the root, with ``::`` and a function if only this function does.
    Empty: no test shows it."""


class Topic(NamedTuple):
    title: str
    promises: tuple[Promise, ...]


README = "README.md"
ARCHITECTURE = "docs/architecture.md"
EXTENDING = "docs/extending.md"
FP8 = "docs/fp8.md"
GPUS = "docs/gpus.md"
INVARIANCE = "docs/invariance.md"
INSTALLATION = "docs/installation.md"
MACHINES = "docs/several_machines.md"
MEGATRON = "docs/megatron.md"
MEMORY_MODEL = "docs/memory_model.md"
MODEL_CHECKING = "docs/model_checking.md"
MODELS = "docs/models.md"
MXFP4 = "docs/mxfp4.md"
PLACEMENTS = "docs/placements.md"
PROTOCOL = "docs/protocol.md"
SECURITY = "docs/security.md"
SIMULATION = "docs/simulation.md"
TORCHTITAN = "docs/torchtitan.md"
TRACING = "docs/tracing.md"
TRAINING = "docs/training.md"
TRANSFORMERS = "docs/transformers.md"
VLLM = "docs/vllm.md"

RESULTS = Topic(
    "Results and their bits",
    (
        Promise(
            "Results are the float64 reference's within a derived bound, for any layer and any routing.",
            MODELS,
            "compare every option with a float64 reference, within bounds that `flashmoe.tolerance` derives",
            (
                "tests/test_properties.py::test_every_rank_agrees_with_the_reference",
                "tests/gpu/test_correct.py::test_every_kind_of_call",
                "tests/gpu/test_correct.py::test_edge",
                "tests/gpu/test_correct.py::test_random_shapes",
            ),
        ),
        Promise(
            "Routers and experts have the options of published models' layers, in any combination.",
            MODELS,
            "The Mixture-of-Experts layers of published models differ in options, and these options can be combined",
            (
                "tests/test_layer_options.py::test_routers",
                "tests/test_layer_options.py::test_experts",
                "tests/gpu/test_options_gpu.py::test_routers",
                "tests/gpu/test_options_gpu.py::test_experts",
            ),
        ),
        Promise(
            "Both engines compute the same layer, by the same protocol.",
            README,
            "The CPU engine runs the same protocol code as the CUDA kernel, on threads, processes and shared memory.",
            ("tests/cpp/test_protocol_lanes.cpp", "tests/gpu/test_cpu_engine.py::test_engines_agree"),
        ),
        Promise(
            "The same inputs give the same bits on every run, whatever the timing.",
            README,
            "The same inputs give the same bits on every run.",
            (
                "tests/test_bitwise.py::test_fifty_disturbed_schedules",
                "tests/test_bitwise.py::test_second_and_thousandth_call_repeat_the_first",
                "tests/gpu/test_correct.py::test_a_hundred_calls_give_the_same_bits",
                "tests/gpu/test_group.py::test_a_hundred_calls_give_the_same_bits",
            ),
        ),
        Promise(
            "With the direct return the bits do not depend on the number of ranks.",
            GPUS,
            "With the direct return, the bits do not depend on the number of GPUs: they are those of one GPU.",
            (
                "tests/test_bitwise.py::test_direct_return_does_not_depend_on_the_number_of_ranks",
                "tests/gpu/test_group.py::test_bits_are_those_of_one_gpu",
            ),
        ),
        Promise(
            "With the reduced return a rank's sum of a token's rows goes home, rounded once.",
            GPUS,
            "a rank sums the rows that its experts made for a token, and sends the sum, which is rounded once",
            (
                "tests/test_reports.py::test_reports_count_what_the_routing_says",
                "tests/cpp/test_protocol_lanes.cpp",
                "tests/gpu/test_group.py::test_bits_are_those_of_one_gpu",
            ),
        ),
        Promise(
            "In 16 bits a token's bits do not depend on the other tokens of its call, and not on the kernel.",
            INVARIANCE,
            "a token's result has the same bits in every call",
            (
                "tests/test_bitwise.py::test_a_tokens_bits_do_not_depend_on_the_others",
                "tests/test_rollouts.py::test_rollouts_have_the_bits_of_training",
                "tests/gpu/test_invariance.py::test_every_prefix",
                "tests/gpu/test_invariance.py::test_random_layers",
                "tests/gpu/test_few.py::test_a_tokens_bits_do_not_depend_on_the_others",
                "tests/gpu/test_few_group.py::test_bits_are_the_general_kernels",
            ),
        ),
        Promise(
            "The order in which tasks are taken changes no bit.",
            GPUS,
            "The order of tasks changes no bit of a result.",
            ("tests/cpp/test_protocol_lanes.cpp", "tests/gpu/test_group.py::test_order_changes_no_bit"),
        ),
        Promise(
            "float32 is multiplied as TF32 on GPUs, within a bound that tells it from exact products.",
            GPUS,
            "float32 factors are truncated to TF32, for an error of about 10⁻³.",
            (
                "tests/gpu/test_correct.py::test_every_kind_of_call",
                "tests/gpu/test_correct.py::test_exact_is_more_than_tf32",
            ),
        ),
        Promise(
            "Transposed weights are read as they lie; a GPU refuses those of float32 by name.",
            MODELS,
            "Both engines read `transposed` weights in the layout in which they are stored. The CUDA engine refuses",
            (
                "tests/test_layer_options.py::test_how_weights_are_stored_changes_no_bit",
                "tests/gpu/test_options_gpu.py::test_transposed",
                "tests/gpu/test_options_gpu.py::test_transposing_changes_no_bit",
                "tests/gpu/test_options_gpu.py::test_transposed_float32_is_refused",
            ),
        ),
        Promise(
            "A call adds to `load` how often its tokens have chosen each expert, in a replayed graph, too.",
            MODELS,
            "Every call, and every replay of a graph, adds to `load` how often this rank's tokens have chosen each",
            (
                "tests/test_observed.py::test_choices_are_counted_in_all_calls",
                "tests/gpu/test_observed_gpu.py::test_choices_are_counted_in_all_calls",
                "tests/gpu/test_observed_gpu.py::test_replayed_graphs",
                "tests/gpu/test_group.py::test_every_rank_counts_its_own_choices",
            ),
        ),
        Promise(
            "A call writes the logits that its scores are made of.",
            MODELS,
            "`router_logits` are the logits from which the scores are computed",
            (
                "tests/test_observed.py::test_logits_are_those_that_scores_are_made_of",
                "tests/gpu/test_observed_gpu.py::test_logits_are_the_references",
                "tests/gpu/test_observed_gpu.py::test_logits_are_those_that_scores_are_made_of",
            ),
        ),
        Promise(
            "A layer read from a checkpoint of a known model computes what the model's block does.",
            MODELS,
            "`tests/test_architectures.py` compares a layer of each model, in float32, with the block of Transformers",
            (
                "tests/test_architectures.py::test_a_layer_computes_what_the_model_s_block_does",
                "tests/test_architectures.py::test_what_a_configuration_changes_is_computed",
                "tests/gpu/test_module.py::test_module_of_a_checkpoints_layer",
            ),
        ),
        Promise(
            "A checkpoint of a model that is not known, or of what is not computed, is refused by name.",
            MODELS,
            "and a model without a row is refused.",
            (
                "tests/test_architectures.py::test_what_is_not_computed_is_refused_by_name",
                "tests/test_architectures.py::test_weights_that_are_quantised_otherwise_are_refused",
            ),
        ),
    ),
)

COMMUNICATION = Topic(
    "Communication and memory",
    (
        Promise(
            "Only rows of tokens travel, each to a rank once, however many of its experts are there.",
            README,
            "Ranks send no padding: every row that they send is a token's. A token's row goes to a rank once",
            (
                "tests/test_reports.py::test_reports_count_what_the_routing_says",
                "tests/cpp/test_protocol_lanes.cpp",
                "tests/gpu/test_network_shape.py::test_reports_count_what_crosses",
            ),
        ),
        Promise(
            "No token is dropped without a capacity factor, whatever the routing.",
            README,
            "No token is dropped unless you ask for that.",
            (
                "tests/test_reports.py::test_reports_count_what_the_routing_says",
                "tests/gpu/test_correct.py::test_edge",
                "tests/gpu/test_group.py::test_skewed_routing",
                "tests/gpu/test_group.py::test_all_experts_on_one_rank",
            ),
        ),
        Promise(
            "A call is one operation of the GPU, of a rank alone and of each rank of a group.",
            README,
            "on one GPU or on several, as one operator and one kernel launch",
            (
                "tests/gpu/test_profiler.py::test_one_operation_per_call",
                "tests/gpu/test_group.py::test_one_gpu_operation_a_call",
            ),
        ),
        Promise(
            "The host does not wait for a call.",
            README,
            "A call launches one kernel on PyTorch's current stream, and the host does not wait for the kernel.",
            (
                "tests/gpu/test_transformers_gpu.py::test_the_host_does_not_wait",
                "tests/gpu/test_graphs.py::test_calls_from_a_stream_that_waits_for_another",
            ),
        ),
        Promise(
            "Ranks do not wait for one another as a group: one may begin the next layer while another is in this.",
            README,
            "There are no collectives: a rank writes its tokens directly into the memory of the rank",
            ("tests/gpu/test_group.py::test_calls_on_successive_layers_overlap",),
        ),
        Promise(
            "Tiles of rows that are here are computed while others are still on their way.",
            README,
            "Idle thread blocks take these tasks, so GEMMs run while other tokens are still on their way.",
            ("tests/cpp/test_own_first.cpp",),
        ),
        Promise(
            "A training forward pass among several GPUs is three launches, behind which the host waits for a count.",
            GPUS,
            "makes three launches: the kernel of the layer, a kernel that counts the rows to keep, and a kernel that",
            ("tests/fake_driver/group_room_cases.py::test_what_is_kept_has_room_before_it_is_counted",),
        ),
        Promise(
            "Each rank brings any number of tokens, none too.",
            README,
            "Each rank has its own tokens, any number of them, and passes the weights of its own experts.",
            (
                "tests/test_edges.py::test_no_rows_and_many_rows_in_turn",
                "tests/gpu/test_group.py::test_uneven_tokens",
                "tests/gpu/test_group.py::test_many_calls_of_changing_size",
            ),
        ),
        Promise(
            "One context serves all layers of a model.",
            README,
            "one context serves all layers of a model",
            (
                "tests/test_bitwise.py::test_second_and_thousandth_call_repeat_the_first",
                "tests/gpu/test_graphs.py::test_several_layers_in_one_graph",
                "tests/gpu/test_correct.py::test_ten_thousand_calls_of_changing_size",
            ),
        ),
        Promise(
            "A context takes the memory that `flashmoe memory` plans.",
            GPUS,
            "prints, on any machine, every array that a context allocates on each GPU.",
            (
                "tests/test_cli.py::test_memory_of_the_cuda_engine",
                "tests/fake_driver/memory_cases.py::test_memory_is_what_the_plan_says",
                "tests/gpu/test_memory.py::test_memory_is_what_the_plan_says",
                "tests/gpu/test_group.py::test_memory_is_what_the_plan_says",
            ),
        ),
        Promise(
            "A context with a capacity factor has memory for what calls with it keep, and refuses others.",
            GPUS,
            "has memory only for the rows that calls with this factor keep. It refuses calls with a larger factor",
            (
                "tests/test_capacity.py::test_calls_are_right_or_refused",
                "tests/test_capacity.py::test_calls_must_have_a_capacity_factor_within_the_contexts",
                "tests/gpu/test_correct.py::test_memory_for_what_a_capacity_keeps",
                "tests/gpu/test_group.py::test_memory_for_what_a_capacity_keeps",
            ),
        ),
        Promise(
            "Nothing is cleared between calls, and no call finds what an earlier one has left.",
            PROTOCOL,
            "Nothing is memset between calls.",
            (
                "tests/test_model.py::test_protocol_holds",
                "tests/cpp/test_group_calls.cpp",
                "tests/gpu/test_group.py::test_many_calls_of_changing_size",
                "tests/gpu/test_join.py::test_calls_leave_nothing_behind",
            ),
        ),
        Promise(
            "No byte of a heap that peers write has two writers.",
            PROTOCOL,
            "In every field that a peer writes, one index of an element names the rank that writes it",
            ("tests/cpp/test_conflict_free.cpp",),
        ),
        Promise(
            "Rows that are joined as they come have the bits of those that are combined.",
            PROTOCOL,
            "one of its warps (or its CPU thread) adds the two rows there and writes these columns of the output",
            (
                "tests/test_joined_calls.py::test_right_and_bit_for_bit_what_combine_gives",
                "tests/gpu/test_join.py::test_right_and_bit_for_bit_what_combine_gives",
            ),
        ),
        Promise(
            "Every interleaving and every routing of two ranks keeps the protocol, and seeded bugs are found.",
            MODEL_CHECKING,
            "search the whole state space of this model: every interleaving, every routing, any number of calls.",
            (
                "tests/test_model.py::test_protocol_holds",
                "tests/test_model.py::test_calls_end",
                "tests/test_model.py::test_bug_is_found",
                "tests/test_model.py::test_relays_hold",
            ),
        ),
        Promise(
            "Groups of the CPU engine have up to 128 ranks, as far as is tested.",
            README,
            "ranks of one machine (tested to 128, at most 1024)",
            ("tests/test_many_ranks.py::test_calls_of_many_ranks", "tests/cpp/test_many_ranks.cpp"),
        ),
        Promise(
            "Ranks whose memory is not mapped exchange rows by puts, with the reduced return.",
            GPUS,
            "GPUs that do not have each other's memory mapped exchange rows by NVSHMEM's puts",
            (
                "tests/cpp/test_puts.cpp",
                "tests/fake_driver/transport_cases.py::test_memory_that_one_rank_cannot_map",
                "tests/gpu/test_group.py::test_bits_are_those_of_one_gpu",
            ),
        ),
        Promise(
            "Ranks on several machines give, with direct returns, the bits of one rank.",
            MACHINES,
            "With `direct` returns, every bit of its result is the same, too.",
            (
                "tests/test_several_machines.py::test_direct_has_the_bits_of_one_rank",
                "tests/test_bad_links.py::test_bits_are_those_of_one_rank",
                "tests/cpp/test_network.cpp",
            ),
        ),
        Promise(
            "A row crosses to each other machine once, and with the reduced return one sum comes back.",
            PROTOCOL,
            "Where ranks are on several machines, a token's row crosses to each of the other machines once",
            (
                "tests/test_once_per_machine.py::test_bits_and_rows_on_one_machine",
                "tests/test_once_per_machine.py::test_what_crosses",
                "tests/cpp/test_machines.cpp",
                "tests/gpu/test_network_shape.py::test_reports_count_what_crosses",
            ),
        ),
        Promise(
            "A GPU's kernel forwards rows among ranks that share memory and are told to be of several machines.",
            PROTOCOL,
            "it has run with 2, 3 and 4 ranks that share one H100, and therefore its memory "
            "(`tests/gpu/test_network_shape.py`).",
            (
                "tests/gpu/test_network_shape.py::test_bits",
                "tests/gpu/test_network_shape.py::test_uneven_tokens",
                "tests/gpu/test_network_shape.py::test_many_calls",
            ),
        ),
        Promise(
            "compute-sanitizer finds no race, no wrong barrier, no stray access and no read of unwritten memory.",
            ARCHITECTURE,
            "the CUDA engine against a float64 reference, graphs, streams, faults, sanitizers",
            (
                "tests/gpu/test_memcheck.py::test_memcheck",
                "tests/gpu/test_initcheck.py::test_initcheck",
                "tests/gpu/test_racecheck.py::test_racecheck",
                "tests/gpu/test_synccheck.py::test_synccheck",
            ),
        ),
        Promise(
            "ThreadSanitizer finds no race in whole calls, with lanes as threads.",
            MEMORY_MODEL,
            "ThreadSanitizer over whole calls with lanes as threads",
            ("tests/cpp/test_protocol_lanes.cpp", "tests/cpp/test_group_calls.cpp", "tests/cpp/test_stress.cpp"),
        ),
        Promise(
            "Whoever takes out one release or acquire of the protocol sees a test fail.",
            MEMORY_MODEL,
            "compiles short calls (`tests/mutation/calls.cpp`) with ThreadSanitizer, and requires that each mutant",
            (),
        ),
    ),
)

WAITS = Topic(
    "Waits, faults and peers",
    (
        Promise(
            "A wait for a rank that died or stands still ends in time, with an error that names it and what it owed.",
            README,
            "ends after `timeout` seconds (with 0: never), with an error that names the rank",
            (
                "tests/test_faults.py::test_a_rank_is_killed_at_any_moment_of_many_calls",
                "tests/cpp/test_wait_and_faults.cpp",
                "tests/gpu/test_group.py::test_a_rank_that_stalls_is_named",
                "tests/gpu/test_group.py::test_a_rank_that_dies_is_named",
            ),
        ),
        Promise(
            "Ranks whose calls differ are told in what they do.",
            PROTOCOL,
            "The OS actor writes its call's configuration (a hash and the values behind it)",
            (
                "tests/test_faults.py::test_calls_disagree",
                "tests/cpp/test_fault_message.cpp",
                "tests/gpu/test_group.py::test_ranks_that_disagree",
            ),
        ),
        Promise(
            "After a fault a context refuses further calls.",
            PROTOCOL,
            "After a fault the context is broken: it makes no further calls",
            (
                "tests/test_faults.py::test_a_handler_that_returns_does_not_end_a_call",
                "tests/fake_driver/fault_cases.py::test_faults",
            ),
        ),
        Promise(
            "On a GPU calls that are queued behind a fault end as they begin.",
            PROTOCOL,
            "On a GPU, a call that is already in the stream ends as soon as it begins",
            (),
        ),
        Promise(
            "A call that a rank refuses is over on all ranks, which say who refused it, and may call again.",
            PROTOCOL,
            'abort call e and raise "rank p refused call e: ...". Unlike after a fault, all ranks may call again',
            (
                "tests/test_refused_calls.py::test_random_calls",
                "tests/cpp/test_refused_calls.cpp",
                "tests/gpu/test_refused_gpu.py::test_random_calls",
                "tests/gpu/test_refused_gpu.py::test_gradients",
            ),
        ),
        Promise(
            "The wait behind a refused call is bounded, and names who holds it up.",
            PROTOCOL,
            "This wait expires if no rank makes progress for `timeout`. Then it names the rank that holds it up",
            (
                "tests/test_refused_calls.py::test_a_wait_for_ranks_that_do_not_come_to_a_refused_call_is_bounded",
                "tests/gpu/test_refused_gpu.py::test_a_rank_that_does_not_come_to_it_is_named",
            ),
        ),
        Promise(
            "A rank that compiles within a call is awaited by the others.",
            GPUS,
            "If a rank compiles during a call, the other ranks of its group wait for it.",
            (
                "tests/fake_driver/pulse_cases.py::test_a_rank_that_compiles_says_so",
                "tests/gpu/test_group.py::test_a_rank_that_compiles_is_awaited",
            ),
        ),
        Promise(
            "A call ends beside kernels that hold the multiprocessors, and beside those of other contexts.",
            ARCHITECTURE,
            "A call is one cooperative launch, with a thread block on every multiprocessor.",
            (
                "tests/gpu/test_graphs.py::test_blockers_do_not_dead_lock_it",
                "tests/gpu/test_graphs.py::test_two_contexts_in_two_streams",
            ),
        ),
        Promise(
            "A call of the CPU engine hears an interrupt while it waits.",
            ARCHITECTURE,
            "The calling thread waits for these threads, and meanwhile it checks for an interrupt.",
            (
                "tests/test_faults.py::test_an_interrupt_ends_a_call",
                "tests/test_interrupts.py::test_an_interrupt_is_heard_behind_the_call_of_another_thread",
            ),
        ),
        Promise(
            "Where there is no memory for a heap, a rank that joins raises `HeapError`.",
            SECURITY,
            "A rank takes the memory of its heap while it joins, and raises `HeapError` if there is not enough.",
            (
                "tests/test_faults.py::test_shared_memory_is_full",
                "tests/test_faults.py::test_heap_larger_than_shared_memory",
            ),
        ),
        Promise(
            "What ranks have left that were all killed while they joined is removed by the next rank that joins.",
            SECURITY,
            "The next rank of that user that joins any group removes such names",
            (
                "tests/test_joining.py::test_heaps_of_ranks_that_were_all_killed_are_removed_by_the_next_group",
                "tests/test_joining.py::test_what_may_be_in_use_is_not_removed",
            ),
        ),
        Promise(
            "Joining across machines ends with an error that names who is missing, doubled, gone or of another mind.",
            MACHINES,
            "a rank is missing | `PeerTimeout`: rank 3 did not join within 30 s",
            (
                "tests/test_several_machines.py::test_joining_ends_with_a_named_error",
                "tests/test_several_machines.py::test_a_rank_that_ends_while_others_join_is_named",
            ),
        ),
        Promise(
            "Where a link is cut, ranks raise within twice the timeout, and name one behind it.",
            MACHINES,
            "`PeerTimeout: rank 2 holds up call 17: ...`, within twice `timeout` at the most.",
            ("tests/test_several_machines.py::test_a_host_that_is_gone_is_named",),
        ),
        Promise(
            "A link that comes back in time changes no result.",
            MACHINES,
            "A link that comes back in time costs that time and nothing else.",
            (
                "tests/test_several_machines.py::test_a_slow_link_and_one_that_is_down_for_a_while_change_nothing",
                "tests/test_bad_links.py::test_bits_are_those_of_one_rank",
            ),
        ),
        Promise(
            "A context that closes waits until other machines have what its rank has sent.",
            MACHINES,
            "`close` waits until the others have what this rank has sent, at most 5 s or `timeout`.",
            (),
        ),
    ),
)

INPUTS = Topic(
    "Input errors and special values",
    (
        Promise(
            "A wrong argument is refused by name in every call, with what was expected, and the context stays good.",
            ARCHITECTURE,
            "checks a layer only once, and finds the checked layer again by its shapes, types and options",
            (
                "tests/test_faults.py::test_bad_argument",
                "tests/test_odd_arguments.py::test_odd_arguments_of_a_call",
                "tests/test_known_layers.py::test_every_call_is_checked",
                "tests/fake_driver/layer_cases.py::test_every_call_is_checked",
            ),
        ),
        Promise(
            "A token of which no choice can be made is NaN and goes to no expert; all other rows keep their bits.",
            MODELS,
            "A row that becomes NaN goes to no expert, also not to the shared one.",
            (
                "tests/test_special_values.py::test_other_rows_keep_their_bits",
                "tests/test_special_values.py::test_they_take_no_expert_s_capacity",
                "tests/gpu/test_special_values_gpu.py::test_rows_of_which_no_choice_can_be_made",
                "tests/gpu/test_special_values_gpu.py::test_rows_take_no_expert_s_capacity",
            ),
        ),
        Promise(
            "An expert with a logit of -inf is chosen only where too few others are left, and weighs nothing.",
            MODELS,
            "An expert with -inf is chosen only if fewer than K other experts are left",
            (
                "tests/test_special_values.py::test_too_few_are_left",
                "tests/gpu/test_special_values_gpu.py::test_experts_that_are_ruled_out",
            ),
        ),
        Promise(
            "An id of -1 leaves a pair out, and its weight is not read.",
            MODELS,
            "that (token, k) pair is left out; with only -1 in its row, a token gets zeros",
            (
                "tests/test_special_values.py::test_other_rows_keep_their_bits",
                "tests/cpp/test_missing_experts.cpp",
                "tests/gpu/test_special_values_gpu.py::test_ids_of_no_expert",
            ),
        ),
        Promise(
            "Wrong ids are an error on the rank whose row it is; the other ranks have their results, and all go on.",
            MODELS,
            "An error is raised when the call is over, on the rank that has the row.",
            (
                "tests/test_special_values.py::test_wrong_ids_are_told_to_their_rank_and_the_group_goes_on",
                "tests/gpu/test_special_values_gpu.py::test_a_rank_s_rows_are_its_own_matter",
            ),
        ),
        Promise(
            "On a GPU such an error is raised once, and calls behind it are made.",
            GPUS,
            "Such an error is raised once: by `ctx.synchronize()`, by `ctx.last_call`, or by a later call.",
            (
                "tests/fake_driver/fault_cases.py::test_rows_that_are_errors",
                "tests/gpu/test_special_values_gpu.py::test_wrong_ids_are_raised_once",
                "tests/gpu/test_faults_gpu.py::test_calls_behind_wrong_ids_are_made",
                "tests/gpu/test_few.py::test_faults",
            ),
        ),
        Promise(
            "With `strict` a row of which no choice can be made is an error, too.",
            MODELS,
            "a rank that has such a row raises `flashmoe.BadRow`, which names the first one.",
            (
                "tests/test_special_values.py::test_strict_calls",
                "tests/gpu/test_special_values_gpu.py::test_strict",
            ),
        ),
        Promise(
            "Gradients of experts leave such rows out, those of a router see them.",
            MODELS,
            "The gradients of the experts are those of the other rows, bit for bit, and all other rows have the same",
            (
                "tests/test_special_values.py::test_gradients",
                "tests/gpu/test_special_values_gpu.py::test_gradients",
                "tests/gpu/test_special_values_gpu.py::test_gradients_of_groups",
            ),
        ),
        Promise(
            "With given routing a NaN in x goes to its own token alone, and one in a weight to what that touches.",
            MODELS,
            "A NaN in x goes to the experts that the row names, and to their gradients.",
            (
                "tests/test_faults.py::test_given_routing_passes_nan_on_to_its_own_token_only",
                "tests/gpu/test_faults_gpu.py::test_nan_in_a_weight_is_no_fault",
            ),
        ),
        Promise(
            "Sizes beyond a GPU's limits are refused by name.",
            GPUS,
            "A rank has at most 65,536 tokens; a layer has at most 1024 experts, and 32 experts a token.",
            ("tests/fake_driver/context_cases.py::test_contexts_that_cannot_be", "tests/cpp/test_policy.cpp"),
        ),
        Promise(
            "A GPU of another compute capability is refused.",
            GPUS,
            "A GPU of compute capability 9.0 (H100, H200)",
            ("tests/fake_driver/context_cases.py::test_a_gpu_of_another_generation",),
        ),
    ),
)

STRANGERS = Topic(
    "Strangers: joining, networks and files",
    (
        Promise(
            "Another user of the machine reads nothing of a rank, ends no process, and delays none beyond its timeout.",
            SECURITY,
            "it reads no byte of a rank, ends no process, and delays no rank beyond the rank's timeout",
            (
                "tests/test_strangers.py::test_a_stranger_is_no_rank",
                "tests/test_strangers.py::test_a_stranger_shortens_its_file",
                "tests/test_strangers.py::test_a_stranger_holds_a_lock",
                "tests/test_strangers.py::test_other_users_cannot_open_a_segment",
            ),
        ),
        Promise(
            "Where another user has taken a rank's name, that is said at once, by path and user.",
            SECURITY,
            "raise `GroupError` at once, which names the path, the user found there and the one expected",
            (
                "tests/test_strangers.py::test_a_name_is_taken_before_ranks_join",
                "tests/test_strangers.py::test_a_name_is_taken_while_ranks_join",
            ),
        ),
        Promise(
            "A rank opens only regular files of its own user, closed to others and of one name.",
            SECURITY,
            "The file must be a regular file of this effective user, with no permissions for group or others",
            (
                "tests/test_strangers.py::test_a_file_that_others_may_open_is_no_rank",
                "tests/test_strangers.py::test_a_file_of_two_names_is_no_rank",
                "tests/test_strangers.py::test_root_is_no_other_user",
            ),
        ),
        Promise(
            "A damaged control page is an error, as far as a look at it can tell.",
            SECURITY,
            "A damaged control page is an error all the same, as far as checks of the page can tell",
            (
                "tests/test_joining.py::test_a_page_that_is_wrong",
                "tests/test_joining.py::test_a_segment_that_is_too_short",
                "tests/test_joining.py::test_the_words_of_a_peer_are_made_text",
            ),
        ),
        Promise(
            "A folder with very many files in it does not delay a rank that joins.",
            SECURITY,
            "The search for such names takes 20 ms at most, so a folder with very many files in it delays nobody.",
            (),
        ),
        Promise(
            "Who does not prove the secret hears a greeting and zeros, and does not keep ranks from meeting.",
            SECURITY,
            "A stranger who proves nothing receives a greeting and 32 zero bytes.",
            ("tests/test_several_machines.py::test_strangers_neither_join_nor_hold_the_listener_up",),
        ),
        Promise(
            "Whoever answers at the rendezvous holds a rank up until its timeout and no longer.",
            SECURITY,
            "A rank waits for whatever answers at the address until its timeout and no longer",
            (
                "tests/test_meeting_strangers.py::test_a_greeting_a_byte_at_a_time_holds_nobody_up",
                "tests/test_meeting_strangers.py::test_a_message_a_byte_at_a_time_holds_nobody_up",
                "tests/test_meeting_strangers.py::test_who_does_not_read_holds_nobody_up",
            ),
        ),
        Promise(
            "Strangers who hold many connections close out no rank.",
            SECURITY,
            "So a stranger who holds many connections closes out nobody at another address.",
            (
                "tests/test_meeting_strangers.py::test_strangers_of_one_address_close_out_no_rank",
                "tests/test_meeting_strangers.py::test_strangers_that_stay_leave_room_for_ranks_of_their_own_address",
                "tests/test_meeting_strangers.py::test_a_flood_of_strangers_keeps_no_group_from_meeting",
            ),
        ),
        Promise(
            "What is in a store without the secret's signature is an error.",
            SECURITY,
            "A value in the store that is not signed with the secret is an error.",
            (
                "tests/test_meeting_strangers.py::test_what_strangers_put_into_the_store_is_an_error_of_the_package",
                "tests/test_meeting_strangers.py"
                "::test_what_a_rank_says_is_its_own_though_the_store_has_an_earlier_meetings",
            ),
        ),
        Promise(
            "A rank without a secret opens nothing to a network.",
            SECURITY,
            "A rank that was given no secret opens nothing to a network, whatever the store says",
            (
                "tests/test_meeting_strangers.py::test_ranks_of_several_machines_need_a_secret_in_a_store",
                "tests/test_meeting_strangers.py::test_a_stranger_who_plays_a_rank_in_the_store_opens_no_network",
            ),
        ),
        Promise(
            "What ranks send one another over a network is encrypted and authenticated.",
            SECURITY,
            "The data is encrypted and authenticated (AES-128-GCM), in order",
            (
                "tests/test_network_strangers.py::test_the_wire_shows_nothing_of_what_it_carries",
                "tests/test_network_strangers.py::test_a_stranger_does_not_become_a_rank",
                "tests/test_network_strangers.py::test_a_certificate_does_not_stand_in_for_the_key",
            ),
        ),
        Promise(
            "Once a group has met nothing listens.",
            SECURITY,
            "Once a group has met, nothing listens, and no descriptor belongs to a stranger.",
            ("tests/test_network_strangers.py::test_nothing_listens_and_nobody_is_let_in_once_a_group_has_met",),
        ),
        Promise(
            "NVSHMEM's transport that lets anybody write is refused by name.",
            SECURITY,
            "refuses `NVSHMEM_REMOTE_TRANSPORT=ucx` unless `NVSHMEM_UCX_TLS` names transports without TCP",
            ("tests/fake_driver/transport_cases.py::test_a_network_on_which_anybody_writes_is_refused",),
        ),
        Promise(
            "NVSHMEM meets on the loopback and opens no network, unless its variables say otherwise.",
            SECURITY,
            "NVSHMEM then meets on its loopback (`NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=lo`) and opens no network",
            (),
        ),
        Promise(
            "Kernels and profiles are read only from folders that nobody else can write to.",
            SECURITY,
            "A folder of kernels or profiles is used only if it belongs to the user of the process or to root",
            (
                "tests/test_jit.py::test_a_cache_to_which_others_can_write",
                "tests/test_jit.py::test_a_cache_that_another_user_has_made",
                "tests/test_profiles.py::test_a_folder_to_which_others_can_write",
                "tests/test_profiles.py::test_a_folder_that_another_user_has_made",
            ),
        ),
        Promise(
            "A kernel's file that is damaged or renamed is compiled again.",
            SECURITY,
            "A kernel's file that is cut short, empty or renamed is compiled again.",
            (
                "tests/test_jit.py::test_a_damaged_kernel_is_compiled_again",
                "tests/test_jit.py::test_a_kernel_under_the_name_of_another_is_not_taken",
            ),
        ),
        Promise(
            "Whatever is wrong with a checkpoint's files is one short error that names the file.",
            SECURITY,
            "Whatever is wrong there is one `CheckpointError`, which names the file and what was found there.",
            ("tests/test_checkpoint_files.py", "tests/test_fuzz.py::test_some_seconds_of_fuzzing"),
        ),
        Promise(
            "Nothing of a size that a file claims is allocated before the file is found to be consistent.",
            SECURITY,
            "Nothing of a size that a file claims is allocated before three checks have passed.",
            (
                "tests/test_checkpoint_files.py::test_a_large_tensor_is_not_read_before_its_shape_is_known_to_fit",
                "tests/test_checkpoint_files.py::test_a_file_that_claims_terabytes_of_json",
                "tests/test_checkpoint_files.py::test_a_layer_larger_than_the_machine",
            ),
        ),
        Promise(
            "Of another library's tensor the DLPack capsule is believed, as far as it is possible.",
            SECURITY,
            "device and offset come from the capsule, and attributes beside the capsule are not believed.",
            (
                "tests/test_exporters.py::test_a_shape_that_only_the_capsule_says",
                "tests/test_exporters.py::test_strides_that_only_the_capsule_says",
                "tests/test_exporters.py::test_a_capsule_that_cannot_be_followed",
                "tests/test_fuzz.py::test_some_seconds_of_fuzzing",
            ),
        ),
    ),
)

GRADIENTS = Topic(
    "Training and gradients",
    (
        Promise(
            "Gradients of all that a layer is made of are the float64 reference's within derived bounds.",
            TRAINING,
            "gradients of x, topk_weights, the router's weight and bias, gate_up_proj, down_proj, their biases | yes",
            (
                "tests/test_training.py::test_layers",
                "tests/test_training.py::test_random_layers",
                "tests/gpu/test_training_gpu.py::test_layers",
                "tests/gpu/test_training_group.py::test_layers",
            ),
        ),
        Promise(
            "So are those of a shared expert and its gate.",
            TRAINING,
            "of the shared expert and its gate | yes | yes",
            (
                "tests/test_training.py::test_shared_experts",
                "tests/gpu/test_training_gpu.py::test_layers",
                "tests/gpu/test_training_group.py::test_layers",
            ),
        ),
        Promise(
            "Losses of the router's logits have gradients.",
            TRAINING,
            "through `router_logits` (auxiliary losses, z loss) | yes | yes",
            (
                "tests/test_training.py::test_losses_of_router_logits",
                "tests/test_training_habits.py::test_losses_of_router_logits_on_four_ranks",
                "tests/gpu/test_training_gpu.py::test_logits_have_gradients",
            ),
        ),
        Promise(
            "There are gradients in bfloat16, float16 and float32, on GPUs as TF32 or exact.",
            TRAINING,
            "bfloat16, float16; float32 | yes; yes | yes; yes, as TF32 or `exact`",
            (
                "tests/test_training.py::test_half_types",
                "tests/test_gradient_tolerance.py::test_bounds_hold",
                "tests/gpu/test_training_gpu.py::test_layers_of_float32",
                "tests/gpu/test_training_group.py::test_layers",
            ),
        ),
        Promise(
            "Several ranks train, some without tokens or experts, with copies of experts.",
            TRAINING,
            "several ranks: direct and reduced, uneven and empty ranks, any placement, copies",
            (
                "tests/test_training.py::test_copies_have_gradients_of_their_own_tokens",
                "tests/gpu/test_training_group.py::test_edges",
            ),
        ),
        Promise(
            "Experts in slices have gradients.",
            TRAINING,
            "Of an expert's slices, the later ones' rows of `down_bias`, which must be 0, get 0.",
            ("tests/test_training.py::test_slices", "tests/gpu/test_training_group.py::test_slices"),
        ),
        Promise(
            "Gradients are added to a caller's float32 buffers before they would be rounded.",
            TRAINING,
            "What is added is the sum in float32, before it would be rounded, at the place where it would be stored",
            (
                "tests/test_main_grad.py::test_one_pass_adds_what_would_be_rounded",
                "tests/test_training_habits.py::test_main_grads_of_several_ranks",
                "tests/gpu/test_training_gpu.py::test_gradients_are_added_to_buffers",
            ),
        ),
        Promise(
            "Gradients have the bits of every run.",
            TRAINING,
            "Two runs give the same bits, whatever the timing.",
            (
                "tests/test_training.py::test_bits_are_those_of_every_run",
                "tests/cpp/test_backward.cpp",
                "tests/gpu/test_training_gpu.py::test_bits_are_those_of_every_run",
                "tests/gpu/test_training_group.py::test_bits_are_those_of_every_run",
            ),
        ),
        Promise(
            "Where x is sent again instead of kept, gradients have the same bits, and less is kept.",
            TRAINING,
            "Gradients have the same bits, and a step as many products.",
            (
                "tests/test_redispatch.py::test_bits_are_those_of_keeping",
                "tests/test_redispatch.py::test_less_is_kept_by_the_rows_of_other_ranks",
                "tests/gpu/test_training_group.py::test_bits_are_those_of_keeping_where_x_is_sent_again",
            ),
        ),
        Promise(
            "A forward pass has the bits that it has without gradients.",
            TRAINING,
            "The forward pass runs all the same, on both engines and under `requires_grad`",
            (
                "tests/test_training.py::test_without_gradients_nothing_is_kept",
                "tests/gpu/test_training_gpu.py::test_the_forward_pass_has_the_bits_that_it_has_without",
            ),
        ),
        Promise(
            "Where there are no gradients, the backward pass says of what.",
            TRAINING,
            "the backward pass raises a `NotImplementedError` that names it.",
            (
                "tests/test_mxfp4_models.py::test_a_module_has_the_checkpoint_s_parameters",
                "tests/fake_driver/fp8_cases.py::test_layers_without_gradients_are_named",
                "tests/gpu/test_training_gpu.py::test_what_has_no_gradients_is_named",
                "tests/gpu/test_network_shape.py::test_there_are_no_gradients",
            ),
        ),
        Promise(
            "Second derivatives and gradients within transforms of torch.func are refused by name.",
            TRAINING,
            "There are no second derivatives, no gradients within transforms of `torch.func`, and no batched ones",
            ("tests/test_derivatives.py::test_the_error_says_what_there_is_not",),
        ),
        Promise(
            "What is kept is what `flashmoe memory --training` counts, and nothing where no gradients are recorded.",
            TRAINING,
            "`flashmoe memory --training` counts it for a layer and a token",
            (
                "tests/test_training.py::test_what_is_kept_is_what_is_planned",
                "tests/test_cuda_training.py"
                "::test_a_token_is_kept_in_as_many_bytes_as_its_rows_choices_and_logits_have",
                "tests/gpu/test_training_gpu.py::test_nothing_is_kept_without_gradients",
                "tests/gpu/test_training_group.py::test_what_is_kept_is_what_was_received",
            ),
        ),
        Promise(
            "Among several GPUs a layer keeps room for a few more rows than it has needed, whatever its calls.",
            TRAINING,
            "What is kept has room for a sixteenth more rows than a call of the layer",
            (
                "tests/fake_driver/group_room_cases.py::test_what_is_kept_has_room_before_it_is_counted",
                "tests/gpu/test_training_group.py::test_a_layer_whose_rows_grow_and_shrink",
            ),
        ),
        Promise(
            "Any number of calls may lie between a forward pass and its backward pass.",
            TRAINING,
            "any number of calls, of any layers, may lie between the two passes.",
            (
                "tests/test_training.py::test_passes_in_any_order",
                "tests/gpu/test_training_gpu.py::test_passes_of_any_number_of_tokens_in_any_order",
                "tests/gpu/test_training_group.py::test_passes_of_any_number_of_tokens_in_any_order",
            ),
        ),
        Promise(
            "A checkpointed layer has the same gradients, whether the call is made again or saved.",
            TRAINING,
            "The second line computes the block again but not the layer's call, whose bytes it keeps",
            (
                "tests/test_training.py::test_a_checkpointed_layer_has_the_same_gradients",
                "tests/test_training.py::test_a_checkpointed_block_compiles",
                "tests/test_module_buffers.py::test_a_call_that_is_made_again_counts_once",
            ),
        ),
        Promise(
            "A backward pass is one launch.",
            TRAINING,
            "So a pass is one launch, and no operator is beside it but for biases",
            (
                "tests/gpu/test_training_gpu.py::test_a_backward_pass_is_one_operation_of_the_gpu",
                "tests/gpu/test_training_group.py::test_a_backward_pass_is_one_operation_of_the_gpu",
            ),
        ),
        Promise(
            "Ranks that are in different passes, or compute other calls' gradients, are told so.",
            TRAINING,
            "Ranks that are in different passes, or that compute the gradients of different calls, are told so",
            (
                "tests/test_training.py::test_ranks_that_disagree_are_told",
                "tests/gpu/test_training_group.py::test_a_rank_that_is_elsewhere_is_named",
            ),
        ),
        Promise(
            "Under DistributedDataParallel, with experts left out, gradients are the whole model's.",
            TRAINING,
            "name the experts' parameters to `_set_params_and_buffers_to_ignore_for_model`",
            ("tests/test_training_habits.py::test_ddp_with_experts_left_out",),
        ),
        Promise(
            "The shipped model trains on with the losses of eager experts.",
            TRAINING,
            "trains the shipped model on for 100 steps: its losses are those with eager experts.",
            (
                "tests/test_training_shipped.py::test_losses_are_those_of_eager_experts",
                "tests/test_train_parallel.py::test_losses_are_those_of_eager_experts",
            ),
        ),
    ),
)

QUANTISED = Topic(
    "Quantised weights",
    (
        Promise(
            "Layers in FP8 are the float64 reference's on the same numbers, within a derived bound.",
            FP8,
            "is float64 on the dequantised weights and quantised rows, with its own table of e4m3.",
            (
                "tests/test_quantised.py::test_layers",
                "tests/test_quantised.py::test_any_layer_agrees_with_the_reference",
                "tests/gpu/test_fp8_gpu.py::test_layers",
                "tests/gpu/test_fp8_gpu.py::test_ranks_of_uneven_tokens",
            ),
        ),
        Promise(
            "Rows are quantised to the bits that PyTorch gives.",
            FP8,
            "These are the bits of PyTorch's `.to(torch.float8_e4m3fn)` of the product within plus and minus 448",
            (
                "tests/test_fp8.py::test_every_bf16_value_has_the_bits_that_torch_gives_it",
                "tests/test_fp8.py::test_engine_package_and_reference_quantise_alike",
            ),
        ),
        Promise(
            "Half the bytes of rows travel to experts in FP8.",
            FP8,
            "The rows of x are then quantised as they are dispatched, so that half the bytes travel.",
            ("tests/test_fp8.py::test_half_the_bytes_travel",),
        ),
        Promise(
            "In FP8, too, bits do not depend on where an expert is, nor on the number of ranks.",
            FP8,
            "where an expert is changes no bit.",
            (
                "tests/test_quantised.py::test_bits_are_the_same_in_every_run_and_on_every_number_of_ranks",
                "tests/cpp/test_quantised.cpp",
                "tests/gpu/test_few_group_fp8.py::test_where_an_expert_is_changes_no_bit",
            ),
        ),
        Promise(
            "x may come quantised, which changes no bit.",
            FP8,
            "three rules hold: the routing is given, there is no `shared_gate`, and y is bfloat16.",
            (
                "tests/test_fp8.py::test_x_may_come_quantised_which_changes_no_bit",
                "tests/gpu/test_fp8_gpu.py::test_x_may_come_quantised_which_changes_no_bit",
                "tests/gpu/test_few_quantised.py::test_x_may_come_quantised_which_changes_no_bit",
            ),
        ),
        Promise(
            "Layers in FP8 that there is no kernel of are refused by name on a GPU.",
            FP8,
            "`flashmoe run` and `bench`; each is refused by name.",
            (
                "tests/fake_driver/fp8_cases.py::test_what_there_is_no_kernel_of_beside_fp8_is_refused",
                "tests/gpu/test_fp8_gpu.py::test_what_there_is_no_kernel_of_is_refused_by_name",
            ),
        ),
        Promise(
            "A checkpoint is quantised but for what is no expert's, and read again as the layer quantised.",
            FP8,
            "quantises the experts' matrices, the shared experts' too, by blocks; all else stays as it is.",
            (
                "tests/test_fp8_models.py::test_what_is_not_quantised_stays_as_it_is",
                "tests/test_fp8_models.py::test_a_layer_of_it_is_the_layer_quantised",
                "tests/test_architectures.py::test_checkpoints_in_fp8",
            ),
        ),
        Promise(
            "A number in MXFP4 is its element times its block's scale, for every code and scale.",
            MXFP4,
            "A number is its element times its block's scale",
            (
                "tests/test_mxfp4.py::test_all_codes_with_all_scales",
                "tests/test_mxfp4.py::test_every_byte_in_every_place",
                "tests/cpp/test_e2m1.cpp",
            ),
        ),
        Promise(
            "Layers in MXFP4 are the float64 reference's on the same numbers, within a derived bound.",
            MXFP4,
            "is float64 on the dequantised weights, with its own list of the 16 numbers and 256 scales.",
            (
                "tests/test_quantised.py::test_layers",
                "tests/test_quantised.py::test_any_layer_agrees_with_the_reference",
                "tests/gpu/test_few_quantised.py::test_layers",
                "tests/gpu/test_few_quantised.py::test_any_layer_agrees_with_the_reference",
            ),
        ),
        Promise(
            "On a CPU they have the bits of the same numbers in bfloat16.",
            MXFP4,
            "So the bits are those of a layer with the same numbers in bfloat16, which takes the same way",
            ("tests/test_mxfp4.py::test_bits_are_those_of_the_same_numbers_in_x_s_type",),
        ),
        Promise(
            "On a GPU calls in MXFP4 that there is no kernel of are refused by name.",
            MXFP4,
            "Other calls, several ranks and float32 are refused by name: there is no other kernel of MXFP4",
            (
                "tests/test_mxfp4.py::test_what_a_gpu_has_no_kernel_of_is_refused_by_name",
                "tests/fake_driver/mxfp4_cases.py::test_what_there_is_no_kernel_of_beside_mxfp4_is_refused",
                "tests/gpu/test_few_quantised.py::test_every_number_of_tokens_in_mxfp4",
            ),
        ),
        Promise(
            "A gpt-oss is written in MXFP4 under the names of its published checkpoints, and Transformers reads it.",
            MXFP4,
            "and writes them under the names of its published checkpoints; all else stays as it is.",
            (
                "tests/test_mxfp4_models.py::test_a_checkpoint_is_as_published_ones_are",
                "tests/test_mxfp4_models.py::test_transformers_reads_the_same_numbers_from_it",
                "tests/test_mxfp4_models.py::test_a_layer_of_it_is_the_layer_quantised",
            ),
        ),
    ),
)

FEW = Topic(
    "Few tokens",
    (
        Promise(
            "A few tokens on one GPU have a kernel of their own, in turn with the general one.",
            GPUS,
            "On one GPU, calls of at most 512 tokens use a separate kernel, if the experts have 48 tokens or fewer",
            (
                "tests/cpp/test_policy.cpp",
                "tests/gpu/test_few.py::test_every_number_of_tokens",
                "tests/gpu/test_profiler.py::test_one_operation_per_call",
            ),
        ),
        Promise(
            "It takes the weights of each chosen expert once.",
            GPUS,
            "This kernel reads the weights of each chosen expert once.",
            ("tests/gpu/test_few.py::test_traced_call",),
        ),
        Promise(
            "So has a context of few tokens among several GPUs.",
            GPUS,
            "Among several GPUs, calls use such a kernel if their ranks have so few tokens",
            (
                "tests/cpp/test_policy.cpp",
                "tests/fake_driver/few_group_cases.py::test_few_tokens_of_several_ranks",
                "tests/fake_driver/few_group_cases.py::test_a_promise_in_a_large_context",
                "tests/gpu/test_few_group.py::test_a_promise_in_a_context_for_many_tokens",
                "tests/test_most_tokens.py::test_a_broken_promise_is_refused_on_all_ranks",
                "tests/gpu/test_few_group.py::test_the_kernel_is_that_of_few_tokens",
            ),
        ),
        Promise(
            "Its bits are the general kernel's, which takes the other layers of such a context.",
            GPUS,
            "other layers use the general kernel, and the bits of results are the same",
            (
                "tests/fake_driver/few_group_cases.py::test_what_the_general_kernel_takes_of_few_tokens",
                "tests/gpu/test_few_group.py::test_bits_are_the_general_kernels",
                "tests/gpu/test_few_group.py::test_among_calls_of_the_general_kernel",
            ),
        ),
        Promise(
            "To its peers a rank with that kernel is like any other: who stalls or disagrees is named.",
            MODEL_CHECKING,
            "is to its peers an instance of the model with `direct` returns",
            (
                "tests/gpu/test_few_group.py::test_a_rank_that_stalls_is_named",
                "tests/gpu/test_few_group.py::test_ranks_that_disagree",
            ),
        ),
        Promise(
            "In FP8 few tokens of one GPU are as near to the reference as others.",
            FP8,
            "Here the result is as near to the reference as in the general kernel, or nearer",
            (
                "tests/gpu/test_few_quantised.py::test_every_number_of_tokens_in_fp8",
                "tests/gpu/test_few_quantised.py::test_layers",
                "tests/gpu/test_few_quantised.py::test_a_tokens_bits_do_not_depend_on_the_others",
            ),
        ),
        Promise(
            "In FP8 a token has the same bits in all calls of a context of few tokens among several GPUs.",
            FP8,
            "A token's result has the same bits in all calls of such a context",
            (
                "tests/gpu/test_few_group_fp8.py::test_layers",
                "tests/gpu/test_few_group_fp8.py::test_hundreds_of_calls",
                "tests/gpu/test_few_group_fp8.py::test_where_an_expert_is_changes_no_bit",
            ),
        ),
    ),
)

EXPERTS = Topic(
    "Placements, slices and shared experts",
    (
        Promise(
            "An expert may be on any rank, and calls of a context may have different placements.",
            PLACEMENTS,
            "calls of a context may have different placements, as long as no rank holds more experts",
            (
                "tests/test_copies.py::test_another_placement_in_each_call_of_a_context",
                "tests/test_copies.py::test_more_experts_on_a_rank_than_the_context_has_room_for",
                "tests/gpu/test_group.py::test_scattered_placement",
            ),
        ),
        Promise(
            "With direct returns copies of experts change no bit.",
            PLACEMENTS,
            "`direct` returns give the same bits as with one holder for each expert.",
            (
                "tests/test_copies.py::test_direct_gives_the_bits_of_one_holder",
                "tests/gpu/test_group.py::test_copies",
                "tests/gpu/test_few_group.py::test_copies",
            ),
        ),
        Promise(
            "A rank sends its tokens of an expert to one copy, its own if it has one.",
            PLACEMENTS,
            "A rank sends all its tokens of an expert to one copy: its own copy, if it has one.",
            (
                "tests/test_copies.py::test_owners_are_as_the_page_says",
                "tests/test_copies.py::test_a_copy_of_all_experts_on_every_rank_sends_nothing",
            ),
        ),
        Promise(
            "A placement made of loads fills the ranks alike, in calls of the shipped layer, too.",
            PLACEMENTS,
            "`balanced` distributes the experts so that the ranks have about as much to compute",
            (
                "tests/test_copies.py::test_balanced_placements_hold_every_expert_and_fill_the_ranks_alike",
                "tests/test_copies.py::test_balanced_placements_of_the_shipped_layer",
            ),
        ),
        Promise(
            "A context can count its load, and modules be placed by it.",
            PLACEMENTS,
            "A context with `count_load=True` counts which experts the tokens of its rank choose",
            (
                "tests/test_moving.py::test_what_a_context_counts",
                "tests/test_moving.py::test_a_module_is_placed_by_what_its_context_has_counted",
                "tests/fake_driver/load_and_logits_cases.py::test_calls_write_to_the_load_of_their_context",
            ),
        ),
        Promise(
            "Experts move to where a new placement wants them, each from a rank that has it.",
            PLACEMENTS,
            "It sends each rank the experts, or slices, that the rank lacks, from ranks that have them.",
            (
                "tests/test_moving.py::test_rows_are_those_of_the_experts_wherever_they_go",
                "tests/test_moving.py::test_what_moves",
                "tests/test_moving.py::test_scales_go_with_their_experts",
            ),
        ),
        Promise(
            "Where a rank's tensors or placements are not right, nothing is sent, and all ranks say whose.",
            PLACEMENTS,
            "are wrong, nothing is sent, and all ranks raise an error with the number of that rank.",
            ("tests/test_moving.py::test_errors_name_the_rank",),
        ),
        Promise(
            "An expert's slices, wherever they are, add up to it.",
            PLACEMENTS,
            "an expert's result is the sum of the results of its slices.",
            (
                "tests/test_slices.py::test_layers",
                "tests/test_slices.py::test_any_placement_of_slices",
                "tests/gpu/test_group.py::test_slices",
            ),
        ),
        Promise(
            "A row crosses to a rank once, whatever slices are there, and one sum of them comes back.",
            PLACEMENTS,
            "A row still crosses to a rank once, even if the rank holds several slices of several experts.",
            (
                "tests/test_slices.py::test_a_row_crosses_once_to_a_rank_with_several_slices",
                "tests/test_slices.py::test_every_split",
            ),
        ),
        Promise(
            "A rank reads the bytes of its own slices of a checkpoint and no others.",
            PLACEMENTS,
            "`load_layer` reads only the bytes of these slices.",
            (
                "tests/test_checkpoint.py::test_of_a_rank_s_part_no_other_byte_is_read",
                "tests/test_fp8_parts.py::test_a_part_is_what_is_cut_of_all",
                "tests/test_mxfp4_models.py::test_a_part_is_what_is_cut_of_all",
            ),
        ),
        Promise(
            "Tokens that ranks hold alike are computed once, and all have the results.",
            PLACEMENTS,
            "and all ranks get all T results. So no token is computed twice.",
            ("tests/test_replicated.py::test_every_rank_gets_the_results_of_its_group_s_tokens",),
        ),
        Promise(
            "A shared expert is computed in the same launch, and no row crosses for it.",
            MODELS,
            "is whole on every rank, and the same launch computes it.",
            (
                "tests/test_shared_expert.py::test_layers",
                "tests/test_shared_expert.py::test_the_routed_part_keeps_its_routing_and_its_report",
                "tests/gpu/test_shared.py::test_layers",
                "tests/gpu/test_shared_up.py::test_a_call_is_one_kernel_where_nothing_is_copied",
            ),
        ),
        Promise(
            "A shared expert whose gate and up are two matrices has the same bits, and each its gradient.",
            MODELS,
            "Both are read where they are, and each has its gradient.",
            (
                "tests/test_shared_in_two.py::test_a_rank_alone_has_the_same_bits",
                "tests/fake_driver/shared_up_cases.py::test_an_up_behind_its_gate_is_read_where_it_is",
                "tests/gpu/test_shared_up.py::test_results",
                "tests/gpu/test_shared_up.py::test_gradients",
            ),
        ),
    ),
)

PYTORCH = Topic(
    "PyTorch: modules, graphs and compilers",
    (
        Promise(
            "Results are of the arguments' kind, arrays or tensors, and of the same bits.",
            README,
            "The result is of the same kind as the arrays.",
            ("tests/test_torch.py::test_tensors_and_arrays_give_the_same_bits",),
        ),
        Promise(
            "The module gives the function's bits, eager and compiled.",
            README,
            "`flashmoe.nn.MoE` is the layer as a PyTorch module",
            (
                "tests/test_torch.py::test_module_passes_its_options_on",
                "tests/test_torch.py::test_compiled_gives_the_bits_of_eager",
                "tests/gpu/test_module.py::test_module",
                "tests/gpu/test_module.py::test_compiled_function",
            ),
        ),
        Promise(
            "A context is made over a process group of torch.distributed.",
            MACHINES,
            "with `Context.from_torch(group, ...)`: the ranks of a process group of any backend.",
            (
                "tests/test_torch.py::test_context_from_a_process_group",
                "tests/gpu/test_group.py::test_a_module_over_a_process_group",
            ),
        ),
        Promise(
            "A launcher's environment says who the ranks are.",
            MACHINES,
            "with `Context.from_launcher`, which takes rank and number of ranks from the environment.",
            ("tests/test_several_machines.py::test_the_demo_under_torchrun",),
        ),
        Promise(
            "A call can be captured into a CUDA graph, and a replay sees what its tensors have then.",
            GPUS,
            "A call can be captured into a CUDA graph, once a similar call has been made before the capture.",
            (
                "tests/fake_driver/capture_cases.py::test_capture",
                "tests/gpu/test_graphs.py::test_replays_see_changed_inputs",
                "tests/gpu/test_group.py::test_graphs",
                "tests/gpu/test_training_gpu.py::test_a_step_in_a_graph",
            ),
        ),
        Promise(
            "The CPU engine runs without PyTorch.",
            INSTALLATION,
            "The CPU engine runs without PyTorch, and pip does not change a PyTorch that is already installed",
            ("tests/test_torch.py::test_package_works_without_torch",),
        ),
    ),
)

FRAMEWORKS = Topic(
    "Transformers, vLLM, Megatron-Core and torchtitan",
    (
        Promise(
            "Models of Transformers have the logits and the greedy tokens of eager experts.",
            TRANSFORMERS,
            "In float32 their logits are within 1e-5 of those with eager experts, and 64 greedy tokens are equal.",
            (
                "tests/test_transformers.py::test_logits_are_those_of_eager_experts",
                "tests/test_transformers.py::test_greedy_tokens_are_those_of_eager_experts",
                "tests/test_transformers.py::test_bfloat16_experts_are_within_the_bound_of_the_reference",
            ),
        ),
        Promise(
            "The shipped model writes the text of eager experts, on one rank and on several.",
            TRANSFORMERS,
            "in float32 200 greedy tokens are those of eager experts, on 1, 2 and 4 ranks",
            (
                "tests/test_shipped_model.py::test_it_writes_what_eager_experts_write",
                "tests/test_shipped_model.py::test_it_foretells_a_passage_as_well_as_eager_experts",
                "tests/gpu/test_shipped_model_gpu.py::test_it_writes_what_eager_experts_write",
                "tests/gpu/test_shipped_model_gpu.py::test_it_foretells_a_passage_as_well_as_eager_experts",
            ),
        ),
        Promise(
            "Experts that are not computed are refused by class and attribute.",
            TRANSFORMERS,
            "Everything else is refused, by class and attribute, when a model takes the name",
            (
                "tests/test_transformers.py::test_experts_that_are_refused",
                "tests/test_transformers.py::test_distributed_tensors_are_refused",
                "tests/test_transformers_check.py::test_a_checkpoint_is_refused_before_its_weights_are_read",
            ),
        ),
        Promise(
            "A fused block is one call, its router too, and on a GPU one kernel.",
            TRANSFORMERS,
            "makes every block one call, which includes the router, for models with two kinds of routers",
            (
                "tests/test_transformers_fuse.py::test_logits_are_those_of_the_model",
                "tests/test_transformers_fuse.py::test_the_router_is_not_called",
                "tests/gpu/test_transformers_gpu.py::test_a_block_is_one_kernel",
            ),
        ),
        Promise(
            "Where a fused block finds hooks or another forward, these run, and a warning names them once.",
            TRANSFORMERS,
            "Then a warning names the block and what was found, once for each.",
            ("tests/test_transformers_fuse.py::test_what_a_call_would_pass_by_runs_and_is_named_once",),
        ),
        Promise(
            "Gradients of a model are those of eager experts.",
            TRANSFORMERS,
            "On the CPU engine, they are those of eager experts. This also holds where ranks have batches of their own",
            (
                "tests/test_transformers.py::test_gradients_are_those_of_eager_experts",
                "tests/test_transformers_ep.py::test_gradients_of_ranks_with_batches_of_their_own",
            ),
        ),
        Promise(
            "Random programs give and save with this package's experts what they do with eager ones.",
            TRANSFORMERS,
            "Random programs compare models with eager ones (`tests/test_transformers_programs.py`)",
            ("tests/test_transformers_programs.py::test_program",),
        ),
        Promise(
            "Layers of one shape share a context, which grows with the calls and goes with the last model.",
            TRANSFORMERS,
            "Layers of one shape, K and type on one device share a context, across models too.",
            (
                "tests/test_transformers.py::test_a_context_is_shared_grows_and_goes",
                "tests/test_transformers.py::test_threads_share_a_context",
                "tests/test_growing.py::test_the_next_call_has_another_context",
            ),
        ),
        Promise(
            "A model whose experts are spread over ranks has the bits of the whole one.",
            TRANSFORMERS,
            "a rank's logits have the bits that the whole model gives for its batch in one process.",
            (
                "tests/test_transformers_parallel.py::test_a_model_that_is_spread_gives_the_same_bits",
                "tests/test_transformers_parallel.py::test_a_model_whose_experts_have_copies_gives_the_same_bits",
            ),
        ),
        Promise(
            "Of other ranks' experts a rank reads nothing.",
            TRANSFORMERS,
            "Of other ranks' experts it reads nothing: no bytes, and no file that has only such.",
            (
                "tests/test_transformers_parallel.py::test_a_rank_opens_no_file_of_others_experts",
                "tests/test_transformers_parallel.py::test_of_tensors_of_all_experts_a_rank_reads_its_rows",
            ),
        ),
        Promise(
            "Transformers' own expert parallelism computes what the whole model does.",
            TRANSFORMERS,
            "Transformers' own expert parallelism takes this package for the way of tokens to experts and back",
            (
                "tests/test_transformers_ep.py::test_a_spread_model_computes_what_the_whole_one_does",
                "tests/test_transformers_ep.py::test_every_architecture_on_two_ranks",
            ),
        ),
        Promise(
            "Transformers' experts in FP8 are computed.",
            FP8,
            "experts in FP8 are computed: Transformers has a table of implementations for such experts",
            ("tests/test_fp8_models.py::test_transformers_experts_in_fp8",),
        ),
        Promise(
            "A gpt-oss in MXFP4 stays so, and is saved so.",
            MXFP4,
            "is a gpt-oss whose experts stay in MXFP4, in parameters of the checkpoint's names",
            (
                "tests/test_mxfp4_models.py::test_experts_stay_in_mxfp4",
                "tests/test_mxfp4_models.py::test_logits_are_those_of_the_dequantised_model",
                "tests/test_mxfp4_models.py::test_what_is_saved_is_the_checkpoint_again",
            ),
        ),
        Promise(
            "Untried releases of vLLM and of training frameworks are left alone; those of Transformers get a warning.",
            VLLM,
            "same holds in a release of vLLM other than these two, in which nobody has tried the plugin",
            (
                "tests/test_transformers.py::test_an_older_release_is_refused",
                "tests/test_transformers.py::test_a_newer_release_is_warned_of_and_used",
                "tests/test_vllm.py::test_vllm_is_left_as_it_is_in_another_release",
                "tests/integrations/training/test_megatron.py::test_another_release_is_left_as_it_is",
                "tests/integrations/training/test_torchtitan.py::test_another_release_is_left_as_it_is",
            ),
        ),
        Promise(
            "vLLM is left as it is unless it is asked for the plugin.",
            VLLM,
            "the plugin writes one line into the log and changes nothing in vLLM",
            (
                "tests/test_vllm.py::test_vllm_is_left_as_it_is_unless_asked",
                "tests/test_vllm.py::test_one_process_of_vllm_s_says_so",
                "tests/integrations/test_vllm_layers.py::test_vllm_s_registries_are_untouched_unless_asked",
            ),
        ),
        Promise(
            "Servers of several ranks generate what one rank does, with the same bits of a token in every call.",
            VLLM,
            "a token's result has the same bits on one rank and on several, however experts",
            (
                "tests/test_vllm.py::test_several_ranks_are_computed",
                "tests/integrations/test_vllm_group.py::test_a_token_s_result_has_the_bits_of_one_rank_s",
                "tests/integrations/test_vllm_group.py::test_experts_in_fp8_have_the_bits_of_one_rank_s",
                "tests/integrations/test_vllm_group.py::test_experts_in_turn",
                "tests/integrations/test_vllm_group.py::test_experts_that_vllm_balances",
                "tests/integrations/test_vllm_group.py::test_ids_of_no_expert",
                "tests/integrations/test_vllm_group.py::test_weights_that_change_in_place_are_used",
                "tests/integrations/test_vllm_group.py::test_a_whole_layer",
                "tests/integrations/test_vllm_serving.py::test_two_ranks_generate_what_one_does",
                "tests/integrations/test_vllm_serving.py::test_two_ranks_answer_200_requests_of_any_length",
            ),
        ),
        Promise(
            "A server of vLLM's of which a rank is killed ends, and names the rank.",
            VLLM,
            "vLLM's engine names the worker",
            ("tests/integrations/test_vllm_serving.py::test_a_killed_rank_is_named_and_the_server_ends",),
        ),
        Promise(
            "A server of vLLM's generates with the plugin what it does without.",
            VLLM,
            "200 greedy tokens from each of five prompts over HTTP are those of vLLM without the plugin",
            (
                "tests/integrations/test_vllm_serving.py::test_the_server_generates_what_vllm_does",
                "tests/integrations/test_vllm_serving.py::test_what_the_plugin_computes_is_what_is_served",
            ),
        ),
        Promise(
            "vLLM's layers are within derived bounds, unquantised and in FP8.",
            VLLM,
            "Layers of every activation above are within the bound of `flashmoe.tolerance` of a float64 sum",
            (
                "tests/integrations/test_vllm_layers.py::test_a_layer_is_within_the_bound_of_its_definition",
                "tests/integrations/test_vllm_layers.py::test_a_layer_in_fp8_is_within_its_bound",
                "tests/integrations/test_vllm_layers.py::test_scales_of_every_kind",
            ),
        ),
        Promise(
            "What the plugin does not compute is refused while vLLM builds the model.",
            VLLM,
            "Everything else is refused while the model is built, and the server does not start",
            (
                "tests/test_vllm.py::test_what_is_not_computed_is_refused_by_name",
                "tests/integrations/test_vllm_layers.py::test_what_is_not_computed_is_refused_when_the_model_is_built",
                "tests/test_vllm.py::test_ranks_that_change_or_split_a_batch_are_refused_by_name",
                "tests/test_vllm.py::test_experts_in_another_fp8_are_refused_by_name",
                "tests/test_vllm.py::test_experts_of_compressed_tensors_in_another_fp8_are_refused_by_name",
                "tests/integrations/test_vllm_group.py::test_another_way_to_send_tokens_is_refused",
                "tests/integrations/test_vllm_serving.py"
                "::test_experts_quantised_otherwise_are_refused_by_layer_and_kind",
            ),
        ),
        Promise(
            "Layers of Megatron-Core have the outputs and gradients of Megatron's own.",
            MEGATRON,
            "Against `SequentialMLP` in float32, outputs and every gradient, the router's and the losses' among them",
            (
                "tests/integrations/training/test_megatron.py::test_outputs_and_gradients_are_those_of_megatrons_layer",
                "tests/integrations/training/test_megatron.py::test_a_gpt_model",
            ),
        ),
        Promise(
            "Spread over ranks, a layer of Megatron-Core has the bits of one rank.",
            MEGATRON,
            "A rank's results have the bits that they have on one rank.",
            ("tests/integrations/training/test_megatron.py::test_two_ranks_are_as_one",),
        ),
        Promise(
            "Distributed checkpoints of Megatron-Core are those of its own experts.",
            MEGATRON,
            "are those of `SequentialMLP`: the same keys",
            (
                "tests/integrations/training/test_megatron.py"
                "::test_distributed_checkpoints_are_those_of_megatrons_layer",
                "tests/integrations/training/test_megatron.py::test_two_ranks_save_what_one_does",
            ),
        ),
        Promise(
            "What is not computed of Megatron's configuration is refused by name.",
            MEGATRON,
            "Refused by name, when the layer is made",
            (
                "tests/integrations/training/test_megatron.py::test_every_flag_is_tried",
                "tests/integrations/training/test_megatron.py::test_what_the_operator_does_not_compute_is_refused",
                "tests/integrations/training/test_megatron.py::test_what_else_is_refused",
            ),
        ),
        Promise(
            "Trainers in 16-bit types, with their defaults, train as with eager experts, but for roundings.",
            TRAINING,
            "as near to eager experts in float32 as eager experts in the 16-bit type are, to a factor of 3",
            (
                "tests/test_trainers.py::test_a_trainer_in_bfloat16",
                "tests/test_trainers.py::test_accelerate",
                "tests/test_fsdp_precision.py::test_float32_weights_train_in_bfloat16",
                "tests/integrations/training/test_trl.py::test_a_trainer_with_its_defaults",
            ),
        ),
        Promise(
            "A gpt-oss in MXFP4 whose blocks Transformers would replace is refused by name.",
            MXFP4,
            "loading such a model is an `InvalidArgument` before its weights are read",
            ("tests/test_mxfp4_models.py::test_blocks_that_transformers_replaces_are_refused_by_name",),
        ),
        Promise(
            "Routed experts of torchtitan have the outputs and gradients of PyTorch's in float64.",
            TORCHTITAN,
            "compares outputs and all gradients with PyTorch's in float64, on one rank and on two",
            (
                "tests/integrations/training/test_torchtitan.py::test_outputs_and_gradients",
                "tests/integrations/training/test_torchtitan.py::test_two_ranks_are_as_one",
                "tests/integrations/training/test_torchtitan.py::test_torchtitans_own_expert_parallelism",
            ),
        ),
        Promise(
            "Other experts of torchtitan, tensor parallelism and compiled blocks are refused by name.",
            TORCHTITAN,
            "Refused by name: experts of another class, as gpt-oss's",
            (
                "tests/integrations/training/test_torchtitan.py::test_other_experts_are_refused",
                "tests/integrations/training/test_torchtitan.py::test_tensor_parallel_experts_are_refused",
                "tests/integrations/training/test_torchtitan.py::test_compiled_blocks_are_refused",
            ),
        ),
    ),
)

COMMANDS = Topic(
    "The command line",
    (
        Promise(
            "`make run` makes an environment, installs the package there and runs a layer, without a GPU.",
            README,
            "makes an environment in `.venv`, installs the package there and runs a small trained layer on four ranks",
            (),
        ),
        Promise(
            "`flashmoe run` judges a layer by the reference, and leaves a picture and a trace.",
            README,
            "In `flashmoe-run/` it leaves a trace of your run for Perfetto, and a picture",
            (
                "tests/test_cli.py::test_run_passes_and_writes_its_files",
                "tests/test_cli.py::test_run_fails_on_a_wrong_result",
                "tests/test_cli.py::test_a_sample_is_judged_as_the_whole",
                "tests/gpu/test_run_command.py::test_run",
            ),
        ),
        Promise(
            "It takes the GPUs where there are some and what they need.",
            README,
            "the layer runs on one GPU instead, as one rank",
            ("tests/test_cli.py::test_engine_auto", "tests/gpu/test_run_command.py::test_auto_takes_the_gpus"),
        ),
        Promise(
            "`flashmoe info` says what is missing and how to install it.",
            README,
            "`flashmoe info` says what this machine can run and what is missing",
            ("tests/test_cli.py::test_info", "tests/test_cli.py::test_info_names_the_remedy"),
        ),
        Promise(
            "`flashmoe tune` stores what beats the built-in order by more than the spread.",
            GPUS,
            "If an order is faster than the built-in order by more than the spread of the times",
            (
                "tests/test_tuning.py::test_less_than_the_spread_is_no_gain",
                "tests/test_tuning.py::test_the_best_is_shown_and_stored",
                "tests/gpu/test_tune.py::test_every_call_of_every_candidate_is_timed",
            ),
        ),
        Promise(
            "Later contexts of the same setting use it.",
            GPUS,
            "Later contexts use a stored order if their GPU, dtype, H, I, E, K and number of ranks are the same.",
            (
                "tests/test_profiles.py::test_an_exact_bucket_is_found_without_a_notice",
                "tests/test_profiles.py::test_else_none",
                "tests/fake_driver/order_cases.py::test_stored_profiles",
                "tests/gpu/test_tune.py::test_a_shape_is_tuned_and_found_by_a_new_context",
            ),
        ),
        Promise(
            "`flashmoe bench` checks what it times, and a point that fails has no figures.",
            README,
            "`flashmoe bench` measures all this on your machine, and checks the results that it times.",
            (
                "tests/test_bench.py::test_suites_in_their_small_form",
                "tests/test_bench.py::test_a_failed_check_voids_its_point_alone",
                "tests/gpu/test_bench_gpu.py::test_a_small_point",
            ),
        ),
        Promise(
            "A traced call has the bits of one that is not, and every task its span.",
            TRACING,
            "The results have the same bits as without a trace.",
            (
                "tests/test_reports.py::test_traced_call",
                "tests/test_account.py::test_cpu_engine",
                "tests/gpu/test_trace_gpu.py::test_traced_call",
            ),
        ),
        Promise(
            "The account of a call's time counts nothing twice and leaves nearly nothing out.",
            TRACING,
            "Each nanosecond belongs to the innermost span around it.",
            (
                "tests/test_account.py::test_every_part",
                "tests/test_account.py::test_no_time_is_counted_twice",
                "tests/gpu/test_trace_gpu.py::test_account",
            ),
        ),
        Promise(
            "`flashmoe simulate` gives the same call every time.",
            SIMULATION,
            "the same inputs give the same call to the last bit.",
            ("tests/cpp/test_simulation.cpp", "tests/test_simulation.py::test_several_machines"),
        ),
        Promise(
            "What it says of one, two and four GPUs is within a tenth of what was measured.",
            SIMULATION,
            "is within a tenth of the measured time on one, two and four GPUs, for both cards",
            ("tests/test_simulation.py::test_predicted_as_measured",),
        ),
        Promise(
            "`flashmoe compile` compiles ahead, without a GPU.",
            GPUS,
            "`flashmoe compile` compiles kernels ahead of the first call, and needs no GPU",
            ("tests/test_jit.py::test_command",),
        ),
    ),
)

RELEASES = Topic(
    "Installation and releases",
    (
        Promise(
            "One wheel serves every Python.",
            INSTALLATION,
            "One wheel serves Linux on x86-64 with glibc 2.28 or newer",
            (
                "tests/test_release.py::test_one_wheel_serves_every_python",
                "tests/test_release.py::test_a_wheel_that_is_not",
            ),
        ),
        Promise(
            "The kernels that it carries are those of the page, and each computes a layer.",
            INSTALLATION,
            "There, each kernel computed a layer within the bounds of its tests.",
            (
                "tests/test_release.py::test_the_documentation_lists_the_kernels_that_are_carried",
                "tests/release/test_carried.py",
            ),
        ),
        Promise(
            "A carried kernel is used if it is of the package's sources, and whole.",
            INSTALLATION,
            "only if the kernel's file is whole and if it was compiled from the same sources as those in the package.",
            (
                "tests/test_jit.py::test_a_carried_kernel_needs_no_compiler",
                "tests/test_jit.py::test_a_carried_kernel_of_other_sources_is_not_taken",
                "tests/test_jit.py::test_a_damaged_carried_kernel_is_not_taken",
            ),
        ),
        Promise(
            "Every other kernel is compiled once, when it is first called.",
            INSTALLATION,
            "Every other kernel is compiled when it is first called",
            (
                "tests/test_jit.py::test_compiles_once",
                "tests/test_jit.py::test_many_processes_compile_once",
                "tests/test_jit.py::test_what_is_not_carried_is_compiled",
            ),
        ),
        Promise(
            "Without nvcc the error names the kernel and what to install.",
            INSTALLATION,
            "Without nvcc, such a call ends with an error that names the kernel and says what to install",
            (
                "tests/test_jit.py::test_no_compiler",
                "tests/release/test_carried.py::test_what_is_not_carried_needs_a_compiler",
            ),
        ),
        Promise(
            "The sdist has all that the package is built from.",
            INSTALLATION,
            "or the sdist: pip install flashmoe_layer-0.2.0.tar.gz",
            ("tests/test_release.py::test_the_sdist_has_what_the_package_is_built_from",),
        ),
        Promise(
            "What is built names no folder and no time of its build, so that another build gives the same.",
            INSTALLATION,
            "The same sources give the same package, byte by byte, at any time and in any folder",
            (
                "tests/test_release.py::test_the_library_names_no_folder_that_it_was_built_in",
                "tests/test_release.py::test_a_wheel_that_another_build_would_not_give",
            ),
        ),
        Promise(
            "The tutorials print what they say.",
            README,
            "[Tutorials](docs/tutorials/one_rank.md): one rank, [several](docs/tutorials/several_ranks.md)",
            ("tests/test_tutorials.py::test_a_tutorial_prints_what_it_says",),
        ),
    ),
)

TOPICS: tuple[Topic, ...] = (
    RESULTS,
    COMMUNICATION,
    WAITS,
    INPUTS,
    STRANGERS,
    GRADIENTS,
    QUANTISED,
    FEW,
    EXPERTS,
    PYTORCH,
    FRAMEWORKS,
    COMMANDS,
    RELEASES,
)
PROMISES: tuple[Promise, ...] = tuple(promise for topic in TOPICS for promise in topic.promises)
