"""The feature table: what PyTorch's FSDP2 does, what shardrt does, and the test that shows it.

python scripts/parity.py        prints the table; exits with 1 if a test that it names does not exist
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent.parent / "tests"


class Row(NamedTuple):
    """One feature. `test` is FILE::NAME in a folder of tests/, less "test_" and ".py"."""

    key: str
    what: str
    fsdp2: str
    ours: str
    test: str


ROWS = [
    Row("A1", "one group per call, bottom-up; FSDP<class>; slices of containers are plain", "yes", "yes", "fsdp_module::slices_of_a_sharded_container_are_plain"),
    Row("A2", "a list of modules is one group; only part of it runs, several times", "yes", "yes, gathered once", "fsdp_module::a_list_of_modules_is_one_group"),
    Row("A3", "reshard_after_forward: True, False, None", "yes", "yes", "training::reshard_after_forward"),
    Row("A3", "reshard_after_forward: a smaller world", "yes", "yes", "hybrid_sharding::a_post_forward_shard_is_kept"),
    Row("A4", "hybrid sharding over two mesh axes", "yes", "yes", "hybrid_sharding::hybrid_sharding"),
    Row("A4", "replication only (data parallel)", "yes", "yes", "hybrid_sharding::replicas_only"),
    Row("A4", "experts on a mesh of their own", "yes", "yes", "hybrid_sharding::experts_on_a_mesh_of_their_own"),
    Row("A4", "axes of a larger mesh (dp_mesh_dims)", "yes", "yes", "fsdp2_names::axes_of_a_larger_mesh"),
    Row("A5", "any shard dim, even or uneven", "even, but for dim 0", "yes, no extra copy", "training::all_dims_in_one_group"),
    Row("A5", "scalars", "no", "yes", "training::odd_sizes"),
    Row("A5", "non-contiguous parameters", "no", "yes", "fsdp_module::parameters_that_are_not_contiguous"),
    Row("A6", "mixed precision: param, reduce and output dtype, inputs cast", "yes", "yes", "training::bf16_parameters_with_float32_reduction"),
    Row("A7", "several dtypes, frozen and trainable, in one group", "one reduce dtype", "yes", "training::mixed_original_dtypes"),
    Row("A8", "tied parameters stored and reduced once", "yes", "yes", "training::gpt_with_tied_embeddings"),
    Row("A8", "tied across groups", "silently untied", "an error with the name", "bad_input::parameter_shared_across_groups"),
    Row("A9", "CPU offload", "yes", "yes", "fsdp_module::the_copies_of_an_offload"),
    Row("A9", "optimizer state on disk", "no", "yes", "buffer_memory::optimizer_state_on_disk"),
    Row("A10", "meta device, to_empty, initialise", "yes", "yes", "meta_device::two_billion_parameters"),
    Row("A10", "initialised alike on any number of ranks", "no", "yes", "meta_device::initialised_alike_on_any_world"),
    Row("A10", "straight from a state dict", "yes", "yes", "meta_device::from_a_state_dict"),
    Row("A11", "ignored parameters", "yes", "yes", "fsdp_module::ignored_parameters_stay_whole"),
    Row("A11", "a module called several times", "yes", "yes", "training::module_used_twice"),
    Row("A11", "modules that do not run", "yes", "yes", "training::module_skipped_in_one_step"),
    Row("A12", "parameters unused on some ranks", "yes", "yes", "fsdp_module::parameters_unused_on_some_ranks"),
    Row("A12", "modules that some ranks skip", "no", "yes", "skipped_modules::each_rank_skips_other_modules"),
    Row("A12", "batch normalization over all ranks", "GPUs only", "yes", "batch_norm::a_sharded_model_trains_as_one_process_on_the_whole_batch"),
    Row("A13", "all-gather extensions of tensor subclasses", "yes", "yes", "extensions::two_tensors_train_as_one"),
    Row("A13", "all-gather extensions set on local tensors", "yes", "yes", "extensions::methods_of_local_tensors"),
    Row("A13", "torchao's float8 weights", "yes", "yes", "extensions::float8_weights_of_torchao"),
    Row("A13", "torchao's int8 and BitNet weights", "yes", "yes", "extensions::quantised_training_of_torchao"),
    Row("A13", "8-bit codes of gathered parameters, for any of them", "no", "yes", "quantized_gather::training"),
    Row("A13", "8-bit codes of reduced gradients", "no", "yes", "quantized_reduce::every_gradient_is_the_sum_of_codes_in_rank_order"),
    Row("B1", "unshard(async_op), reshard", "yes", "yes", "fsdp_module::unshard_ahead"),
    Row("B2", "gradient sync off: accumulation in the reduce dtype", "yes", "yes", "training::accumulation_over_three_microbatches"),
    Row("B2", "all-reduce off: hybrid accumulation by reduce-scatter only", "yes", "yes", "hybrid_sharding::hybrid_sharding_accumulates_by_reduce_scatter_only"),
    Row("B2", "reshard_after_backward, is_last_backward", "yes", "yes", "fsdp_module::parameters_stay_gathered_between_microbatches"),
    Row("B2", "set_manual_backward_finalization, finalize_backward (torch 2.15)", "yes", "yes", "fsdp2_names::backwards_that_are_finalized_by_hand"),
    Row("B2", "set_keep_unsharded_storage (torch 2.15)", "yes", "yes", "fsdp2_names::storage_that_stays"),
    Row("B2", "unshard_in_backward", "yes", "yes", "prefetch::a_module_whose_backward_reads_no_parameters"),
    Row("B3", "named modules gathered ahead", "yes", "yes", "prefetch::named_modules_are_gathered_ahead"),
    Row("B3", "automatic prefetch both ways, within a budget", "backward only", "yes", "prefetch::a_prefetch_policy"),
    Row("B4", "divide factor, force-sum, float16 divided in two steps", "yes", "yes", "hybrid_sharding::divide_factors"),
    Row("B4", "all-reduce hook", "yes", "yes", "hybrid_sharding::a_hook_on_what_was_reduced"),
    Row("B5", "custom all-gather and reduce-scatter", "yes", "yes", "fsdp_module::custom_collectives"),
    Row("B5", "gathering into memory that NCCL knows", "yes, also windows", "yes", "nccl::a_pool_is_of_memory_that_nccl_knows"),
    Row("B5", "NCCL's symmetric windows", "yes", "yes", "fsdp2_names::symmetric_windows"),
    Row("B5", "post-optimizer event", "yes", "yes", "fsdp_module::gathers_wait_for_a_given_event"),
    Row("B4", "all-reduce hook on a stream of its own", "yes", "yes", "fsdp2_names::a_hook_on_a_stream_of_its_own"),
    Row("B6", "several reductions in flight", "yes", "yes", "fsdp_module::reductions_in_flight"),
    Row("B6", "reduce-scatter on a communicator of its own", "on request", "always", "training::threaded_streams_give_the_same_bits"),
    Row("B7", "reset_iter_state after an exception", "yes", "yes, bit for bit", "bad_input::exception_in_forward_and_in_backward"),
    Row("B8", "to(), float(), to_empty() on a sharded module", "yes", "yes", "fsdp_module::moved_and_cast_after_sharding"),
    Row("B8", "register_fsdp_forward_method", "yes", "yes", "fsdp_module::other_methods_as_forwards"),
    Row("B8", "share_comm_ctx; several roots", "yes", "always shared", "fsdp_module::two_roots_take_turns"),
    Row("B8", "to() with gradients; memory_format; torch's swap flag", "yes", "yes", "other_uses::gradients_move_with_parameters"),
    Row("B8", "deepcopy of a sharded module: shards of its own", "no", "yes", "averaged_models::copy_trains_as_another_model_would"),
    Row("B8", "AveragedModel, EMA of a sharded model", "no", "yes", "averaged_models::averages_are_those_of_a_plain_model"),
    Row("B8", "parameters replaced before the first forward", "yes", "yes", "replaced_parameters::registered_before_the_first_forward"),
    Row("B8", "functional_call with other parameters", "no", "an error with the name", "replaced_parameters::functional_call"),
    Row("B8", "load_state_dict(assign=True) on a meta model", "yes", "yes", "replaced_parameters::a_meta_model_takes_a_sharded_state"),
    Row("B8", "fully_shard.state", "yes", "yes", "fsdp2_names::the_state_of_a_module"),
    Row("B9", "activation checkpointing, both modes", "yes", "yes", "training::activation_checkpointing"),
    Row("B9", "the same, a module called twice", "yes", "yes", "fsdp_module::a_module_called_twice_and_recomputed"),
    Row("B9", "torch.compile of blocks", "yes", "yes", "compile::inductor"),
    Row("B9", "no_grad, eval and inference mode around training steps", "yes", "yes", "evaluation::forwards_without_gradients_around_training_steps"),
    Row("B9", "inference mode first, then training", "yes", "yes", "training::a_first_forward_in_inference_mode"),
    Row("B9", "several backwards through one forward", "yes", "yes", "evaluation::three_backwards_through_one_forward"),
    Row("B9", "gradients of gradients: forces, penalties", "no", "yes", "evaluation::gradients_of_gradients"),
    Row("B9", "operations in place on what sharded modules return", "not on views, a warning", "yes", "fsdp_module::operations_in_place_between_sharded_modules"),
    Row("B8", "hooks of parameters (register_hook)", "never called", "yes", "fsdp_module::hooks_of_parameters"),
    Row("B8", "a sharded module inside of several sharded ones", "yes", "yes", "fsdp_module::a_sharded_module_inside_of_several_sharded_ones"),
    Row("B8", "a model that nobody refers to is freed", "yes", "yes", "freed_models::models_are_freed"),
    Row("B8", "an optimizer of parameters that were replaced", "trains nothing", "an error with the name", "replaced_parameters::an_optimizer_of_parameters_that_were_replaced"),
    Row("B9", "optimizer in backward", "yes", "yes", "fsdp_module::optimizer_in_backward"),
    Row("C1", "n-D mesh: slices, flattening, coordinates", "yes", "yes", "device_mesh::communicators_join_the_ranks_of_a_part"),
    Row("C1", "init_device_mesh, DeviceMesh's names, axes without names", "yes", "yes", "device_mesh::init_device_mesh"),
    Row("C2", "torch's arguments of redistribute, from_local, distribute_tensor", "yes", "yes", "dtensor::names_and_arguments_of_torch"),
    Row("C2", "distribute_tensor takes one rank's values", "yes", "yes", "distribute::one_ranks_values"),
    Row("C2", "zeros, ones, empty, full, rand, randn", "yes", "yes", "distribute::factories"),
    Row("C2", "with mesh: the default mesh", "yes", "yes", "distribute::the_default_mesh_and_placements"),
    Row("C2", "distribute_module", "yes", "parallelize_module instead", "parallel_styles::preparations"),
    Row("C3", "activation functions and losses, forward and backward", "yes", "yes", "tensor_functions::elementwise_functions"),
    Row("C3", "sharded and replicated operands", "yes", "yes", "tensor_functions::operands_that_lie_differently"),
    Row("C2", "redistribute between every pair of placements", "no ragged ones", "yes", "redistribute::every_pair_on_two_axes"),
    Row("C3", "every torch optimizer: for-loop, foreach, fused", "yes", "yes", "optimizer_steps::optimizers"),
    Row("C3", "sharded and plain parameters in one step", "no", "yes", "dtensor::plain_and_sharded_parameters_in_one_step"),
    Row("C3", "bitsandbytes' optimizers", "not tried", "yes", "other_optimizers::bitsandbytes"),
    Row("C3", "torchao's optimizers", "yes", "yes", "other_optimizers::torchao"),
    Row("C3", "a full optimizer state is sharded as it is loaded", "not tried", "yes", "other_optimizers::a_full_optimizer_state_is_sharded"),
    Row("C3", "indexing, slicing, inspection; writes through them", "in part", "yes", "dtensor::writes"),
    Row("C3", "all of torch.nn.init, alike on any number of ranks", "in part", "yes", "dtensor::initialisation_is_that_of_one_rank"),
    Row("C3", "random numbers independent of ranks and cuts", "CUDA only", "yes", "random_numbers::the_same_on_any_number_of_ranks"),
    Row("C4", "tensor parallelism: Linear by columns and rows, any sizes", "in part", "yes", "parallel_styles::layouts_of_linear_layers"),
    Row("C4", "the same for Embedding", "yes", "yes", "parallel_styles::embeddings"),
    Row("C4", "sequence parallelism: norms and dropout on parts of the tokens", "yes", "yes", "parallel_styles::sequence_parallel"),
    Row("C4", "PrepareModuleInput, PrepareModuleOutput, both", "yes", "yes", "parallel_styles::preparations"),
    Row("C4", "one collective for all modules that read one tensor", "yes", "yes", "parallel_styles::modules_that_read_one_tensor_share_one_reduction"),
    Row("C4", "parameters outside of the plan", "foreach optimizers fail", "yes", "parallel_styles::optimizers_over_parameters_that_no_style_names"),
    Row("C4", "the same, used on split activations: norms of queries and keys, scales", "a wrong gradient in silence", "yes", "replicated_gradients::a_model_trains_as_on_one_process"),
    Row("C4", "activations are local tensors; DTensors on request", "DTensors inside", "yes", "parallel_styles::activations_as_dtensors"),
    Row("C4", "embedding and cross-entropy on parts of the vocabulary", "yes", "2 collectives", "vocabulary::two_collectives_forward_and_none_backward"),
    Row("C4", "loss_parallel", "backward inside", "backward anywhere", "vocabulary::the_context_of_loss_parallel"),
    Row("C4", "a transformer trains as on one process", "yes", "yes", "parallel_styles::a_transformer_trains_as_on_one_process"),
    Row("C4", "the training script, 1-D and 2-D", "", "yes", "train_script::ranks_with_parts_of_a_sequence_have_the_loss_curve_of_one"),
    Row("C4", "the training script: experts and pipeline stages, with context parallelism", "", "yes", "train_script::ranks_with_experts_or_stages_have_the_loss_curve_of_one"),
    Row("C4", "expert parallelism under fully_shard, exact; uneven loads", "torchtitan", "yes", "expert_parallel::training_on_any_mesh"),
    Row("C4", "ranks and experts without tokens", "not tried", "yes", "expert_parallel::ranks_and_experts_without_rows"),
    Row("C4", "expert parallelism of transformers' models by a plan", "transformers' own", "yes", "expert_models::a_model_trains_as_on_one_process"),
    Row("C4", "checkpoints of another number of expert-parallel ranks", "not tried", "yes", "expert_parallel::a_checkpoint_of_other_degrees"),
    Row("C4", "loads of experts, and the bias of DeepSeek-V3", "torchtitan", "yes", "expert_models::loads_become_even"),
    Row("C5", "two dimensions: sharding of tensor-parallel parameters, even or not", "even, or strided shards", "yes", "two_dimensional::training"),
    Row("C5", "three dimensions: hybrid sharding of tensor-parallel parameters", "yes", "yes", "two_dimensional::three_dimensions"),
    Row("C5", "gradients that are sums over tensor-parallel ranks", "in the optimizer", "once per group", "two_dimensional::accumulation_and_unused"),
    Row("C5", "one norm of parameters on several meshes", "no", "yes", "two_dimensional::optimizers_and_clipping"),
    Row("C5", "extensions: pre_flatten_transform", "FSDP1", "yes", "tp_extensions::pre_flatten_transform"),
    Row("C5", "extensions: post_unflatten_transform", "FSDP1", "yes", "tp_extensions::post_unflatten_transform"),
    Row("C5", "extensions: chunk_tensor", "FSDP1, legacy sharded tensors", "a part of both meshes", "tp_extensions::chunk_tensor"),
    Row("C5", "extensions: chunk_dtensor", "FSDP1", "yes", "tp_extensions::chunk_dtensor"),
    Row("C5", "extensions: pre_load_state_dict_transform", "FSDP1, legacy sharded tensors", "with exact boxes", "tp_extensions::pre_load_state_dict_transform"),
    Row("C5", "extensions: all_gather_dtensor", "FSDP1", "yes", "tp_extensions::all_gather_dtensor"),
    Row("C5", "extensions: a class of the user's", "FSDP1, private", "yes", "tp_extensions::a_class_of_the_users"),
    Row("C6", "context parallelism: ring, all-gather; full or causal attention alone, without windows", "on GPUs: flash, memory-efficient, cuDNN", "on CPUs; not yet run on GPUs", "context_parallel::equal_to_one_process"),
    Row("C6", "context parallelism: FlexAttention, any mask", "on GPUs", "forward on CPUs, as torch; not yet run on GPUs", "context_flex::as_torch_on_one_process"),
    Row("C6", "lengths that do not divide", "no", "yes", "context_parallel::equal_to_one_process"),
    Row("C6", "documents", "flex_attention", "on CPUs; not yet run on GPUs", "context_parallel::equal_to_one_process"),
    Row("C6", "exchange of heads for tokens (Ulysses), with dropout", "no", "on CPUs; not yet run on GPUs", "context_parallel::dropout_of_ulysses"),
    Row("C6", "few heads of keys travel as few", "", "yes", "context_parallel::few_heads_travel"),
    Row("C6", "buffers cut in place and restored", "yes", "yes", "context_parallel::buffers_are_cut_and_restored"),
    Row("C6", "under sharding: one mean over unevenly ignored labels", "by the user", "yes", "context_models::sharded_over_both_axes"),
    Row("C6", "with recomputed blocks (use_reentrant=False); recomputed outside, an error", "inside", "yes", "context_parallel::recomputed_in_backward"),
    Row("C6", "with tensor parallelism", "yes", "yes", "context_models::tensor_parallel"),
    Row("C6", "models of transformers as they are", "by Accelerate", "yes", "context_models::models_of_transformers"),
    Row("D1", "GradScaler", "yes", "yes", "dtensor::grad_scaler"),
    Row("D2", "torch's get_model_state_dict", "yes", "sharded; full: an error", "other_uses::checkpoint_helpers_of_torch"),
    Row("D2", "the same without torch.distributed: full ones, streamed, on rank 0 or all", "yes", "yes", "full_state_dicts::options_are_those_of_torch"),
    Row("D2", "full states continue in a plain process, and back", "yes", "yes", "full_state_dicts::full_ones_continue_in_a_plain_process"),
    Row("D3", "checkpoints in DCP's format: what FSDP2 wrote", "DCP", "yes", "checkpoint_peers::what_fsdp2_wrote_is_read_on_any_number_of_ranks"),
    Row("D3", "checkpoints in DCP's format: read by stock DCP", "DCP", "yes", "checkpoint_peers::stock_dcp_reads_what_was_written_here"),
    Row("D3", "another number of ranks, mesh, wrapping, tensor-parallel degree", "DCP", "yes", "checkpoint_loading::of_any_world_in_any_wrapping"),
    Row("D3", "each rank reads what it needs", "whole items", "within 5 %", "checkpoint_loading::bytes_that_are_read"),
    Row("D3", "straight onto a meta-device model, optimizer state made without a step", "by a step", "yes", "checkpoint_loading::onto_a_meta_model"),
    Row("D3", "optimizer state by name, in other groups", "yes", "yes", "checkpoint_loading::other_groups_of_parameters"),
    Row("D3", "a flipped byte is named with file and tensor", "no", "yes", "checkpoint_loading::a_flipped_byte"),
    Row("D3", "killed at any moment of a save: the older checkpoint stays", "not when replaced", "yes", "checkpoint_atomic::killed_in_a_save_the_last_committed_one_loads"),
    Row("D3", "asynchronous saves into buffers that are kept", "on request", "yes", "checkpoint_async::the_second_save_allocates_nothing"),
    Row("D3", "an error in the background is raised on every rank", "by the future", "yes", "checkpoint_async::an_error_in_the_background_is_raised_on_every_rank_and_the_next_save_works"),
    Row("D3", "inspect, verify and convert without ranks", "converts torch.save", "yes", "checkpoint_cli::every_kind_becomes_every_other"),
    Row("D3", "lost ranks: the others go on in the same processes, others take their place", "torchft, by replicas", "yes", "survival::lost_ranks_are_replaced"),
    Row("D3", "runs that resume, bitwise at one world size", "torchtitan", "yes", "runs::a_killed_job_goes_on_to_the_same_end"),
    Row("D4", "Hugging Face safetensors, each rank its slices", "shard files, joined later", "final files", "safetensors::models_of_transformers"),
    Row("D5", "ranges in a profile", "yes", "yes, the same names", "fsdp2_names::ranges_in_a_profile"),
    Row("D5", "timelines by group and stream, all ranks in one", "one rank, by kernels", "yes", "timeline::a_step_shows_groups_streams_memory_and_arrows"),
    Row("D5", "the forecast of a step as a timeline", "no", "yes", "timeline::a_dry_run_has_the_events_of_the_real_one"),
    Row("D5", "memory of each group over a step, drawn", "by allocation", "yes", "timeline::memory_is_drawn"),
    Row("D5", "parts of the process's peak, adding up", "of tensors", "yes", "memory_account::parts_of_a_process_add_up"),
    Row("-", "transforms of torch.func, forward-mode AD", "yes", "yes", "other_uses::the_first_forward_inside_a_transform"),
    Row("-", "generate(), methods beside forward", "yes", "yes", "other_uses::generation"),
    Row("-", "HF Trainer, Accelerate", "FSDP2 by Accelerate", "yes", "frameworks::transformers"),
    Row("-", "Lightning", "yes", "yes", "frameworks::lightning"),
    Row("-", "a process group of torch.distributed: every collective, messages, groups", "yes", "by a bridge, on shardrt's communicators", "torch_distributed::calls_are_gloos"),
    Row("-", "DDP and its hooks, FSDP2, DTensor, functional collectives, DCP on it", "yes", "by the bridge", "torch_distributed::training_is_gloos"),
    Row("-", "torch's pipelines: GPipe, 1F1B, interleaved, zero-bubble", "yes", "by the bridge", "torch_distributed::pipelines_are_gloos"),
    Row("-", "sharded stages in torch's pipelines, reduced once in a step", "yes", "but zero-bubble without its gain", "pipelining::sharded_stages_train_as_one_process"),
    Row("-", "one norm of the gradients of all pipeline stages, the same to the bit on every rank", "torchtitan", "yes", "pipelining::gradients_are_clipped_by_the_norm_of_all_stages"),
    Row("-", "checkpoints of another number of pipeline stages", "DCP", "yes", "train_script::stages_and_experts_go_on_as_they_were_or_divided_otherwise"),
    Row("-", "a script for FSDP2, changed in 11 lines", "", "yes", "examples::from_fsdp2_trains_as_the_original"),
]  # fmt: skip


def main() -> None:
    """Print the table; exit with the missing tests, if any."""
    missing = [row.test for row in ROWS if not _exists(row.test)]
    head = Row("row", "feature", "FSDP2", "shardrt", "test")
    widths = [max(len(row[column]) for row in (head, *ROWS)) for column in range(4)]
    for row in (head, *ROWS):
        cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
        print("  ".join([*cells, row.test]))
    if missing:
        sys.exit(f"no such test: {', '.join(missing)}")


def _exists(test: str) -> bool:
    file, name = test.split("::")
    programs = (ast.parse(path.read_text()) for path in TESTS.rglob(f"test_{file}.py"))
    return any(isinstance(node, ast.FunctionDef) and node.name == f"test_{name}" for tree in programs for node in tree.body)


if __name__ == "__main__":
    main()
