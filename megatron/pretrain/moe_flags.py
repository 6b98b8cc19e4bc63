# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Declares the flags of models with experts and of expert parallelism, and decides whether they fit together.

It builds neither models nor groups.
"""

import argparse

from megatron.pretrain.values import integer, number, one_of

DISPATCHERS = ("allgather", "alltoall")
BALANCED_BY_LOSS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
BALANCING = (*BALANCED_BY_LOSS, "sinkhorn", "none")
EXPERT_FLAGS = (
    "--moe-ffn-hidden-size",
    "--moe-router-topk",
    "--moe-router-pre-softmax",
    "--moe-router-score-function",
    "--moe-router-load-balancing-type",
    "--moe-router-dtype",
    "--moe-router-enable-expert-bias",
    "--moe-router-bias-update-rate",
    "--moe-aux-loss-coeff",
    "--moe-z-loss-coeff",
    "--moe-token-dispatcher-type",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--overlap-moe-expert-parallel-comm",
)

_count = integer(1)


def add_moe_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of models with experts."""
    add = parser.add_argument_group("experts").add_argument
    add("--num-experts", type=_count, help="experts in place of the MLP of every layer")
    add("--moe-ffn-hidden-size", type=_count, help="width of an expert; default --ffn-hidden-size")
    add("--moe-router-topk", type=_count, default=2, help="experts that each token goes to")
    add("--moe-router-pre-softmax", action="store_true", help="take the softmax over all experts, not over the chosen")
    add(
        "--moe-router-score-function",
        type=one_of("softmax", "sigmoid"),
        default="softmax",
        help="what turns the router's logits into weights",
    )
    add(
        "--moe-router-load-balancing-type",
        type=one_of(*BALANCING),
        default="aux_loss",
        help=f"what spreads tokens over experts: {', '.join(BALANCING)}",
    )
    add("--moe-aux-loss-coeff", type=number(0.0), default=0.0, help="weight of the loss that spreads tokens")
    add("--moe-z-loss-coeff", type=number(0.0), help="weight of a loss on the size of the router's logits")
    add("--moe-router-dtype", type=one_of("fp32", "fp64"), help="dtype of routing; default the model's")
    add(
        "--moe-router-enable-expert-bias",
        action="store_true",
        help="spread tokens by a bias on each expert's score, moved after every step, instead of a loss",
    )
    add("--moe-router-bias-update-rate", type=number(0.0), default=1e-3, help="how far a step moves that bias")
    add(
        "--moe-token-dispatcher-type",
        type=one_of(*DISPATCHERS),
        default="allgather",
        help="how tokens reach the ranks of their experts: allgather or alltoall",
    )
    add("--expert-model-parallel-size", type=_count, default=1, help="ranks that share the experts of a layer")
    add(
        "--expert-tensor-parallel-size",
        type=_count,
        help="ranks that share an expert: 1, or --tensor-model-parallel-size (the default)",
    )
    add(
        "--overlap-moe-expert-parallel-comm",
        action="store_true",
        help="send one microbatch's tokens to their experts while another one computes",
    )


def complete_experts(args: argparse.Namespace, world_size: int) -> None:
    """Check that experts can be shared as the flags say, and fill in what follows from others.

    Raises:
        ValueError: Experts or ranks cannot be divided so, or settings of the router contradict each other.
    """
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    if args.num_experts is None:
        return
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    _check_tensor_parallelism(args)
    _check_division(args, world_size)
    _check_router(args)
    if args.overlap_moe_expert_parallel_comm:
        _check_overlap(args)
    if args.expert_model_parallel_size == 1 and not args.disable_bias_linear:
        # megatron-core adds them in place, to what autograd does not let be written.
        cure = "Add --disable-bias-linear"
        _fail("Experts", "no biases without expert parallelism", "--num-experts", "some", cure)
    if args.cuda_graph_impl != "none":
        _fail("CUDA graphs", "a model without experts, whose numbers of tokens the host has to know", "--num-experts")


def _fail(what: str, expected: str, flag: str, found: object = "another value", cure: str = "Drop one") -> None:
    raise ValueError(f"{what}: expected {expected}, got {found} for {flag}. {cure}.")


def _check_division(args: argparse.Namespace, world_size: int) -> None:
    size = args.expert_model_parallel_size
    flag = "--expert-model-parallel-size"
    if args.num_experts % size:
        _fail("Experts", f"a divisor of --num-experts {args.num_experts}", flag, size, "Change one of them")
    pieces, stages = args.expert_tensor_parallel_size, args.pipeline_model_parallel_size
    ranks = world_size // stages
    if ranks % (size * pieces):
        cure = "Change it or the number of ranks"
        each = f", {pieces} for each expert" if pieces > 1 else ""
        _fail("Expert parallelism", f"a divisor of the {ranks} rank(s) of a stage{each}", flag, size, cure)
    copies, instances = ranks // (size * pieces), args.num_distributed_optimizer_instances
    if copies % instances:
        cure = "Change one of them or the number of ranks"
        flag = "--num-distributed-optimizer-instances"
        _fail("Optimizer instances", f"a divisor of the {copies} copies of each expert", flag, instances, cure)


def _check_tensor_parallelism(args: argparse.Namespace) -> None:
    size, dense_size = args.expert_tensor_parallel_size, args.tensor_model_parallel_size
    flag = "--expert-tensor-parallel-size"
    if size not in (1, dense_size):
        _fail("Experts", f"1 or --tensor-model-parallel-size {dense_size}", flag, size, "Change one of them")
    if dense_size == 1:
        return
    if not args.sequence_parallel:
        cure = "Add --sequence-parallel"
        _fail("Experts", "--sequence-parallel with tensor parallelism", "--num-experts", "none", cure)
    if size > 1 and not args.disable_bias_linear:
        _fail("Experts", "no biases where ranks share an expert", flag, size, f"Add --disable-bias-linear, or {flag} 1")
    if size == 1 and args.expert_model_parallel_size % dense_size:
        _fail(
            "Experts",
            f"a multiple of --tensor-model-parallel-size {dense_size}, so that its ranks hold different experts",
            "--expert-model-parallel-size",
            args.expert_model_parallel_size,
            f"Change one of them, or leave {flag} out",
        )
    if size > 1 and args.moe_ffn_hidden_size % size:
        _fail("Experts", f"a multiple of {flag} {size}", "--moe-ffn-hidden-size", args.moe_ffn_hidden_size, "Change it")


def _check_overlap(args: argparse.Namespace) -> None:
    """Check what megatron-core's schedule plans need: two microbatches at a time, whose layers run in parts."""
    flag = "--overlap-moe-expert-parallel-comm"
    if args.expert_model_parallel_size == 1:
        _fail(flag, "2 or more", "--expert-model-parallel-size", 1, "Raise it, or drop the overlap")
    if args.moe_token_dispatcher_type != "alltoall":
        found = args.moe_token_dispatcher_type
        _fail(flag, "alltoall", "--moe-token-dispatcher-type", found, "Change it, or drop the overlap")
    if not (args.bf16 or args.fp16):
        _fail(flag, "16-bit compute", "--bf16", "none", "Add it, or drop the overlap")
    if args.recompute_granularity == "full":
        _fail(flag, "no full recomputation", "--recompute-granularity", "full", "Drop one of them")
    if "moe" in (args.recompute_modules or ()):
        _fail(
            flag,
            "other modules, as experts run apart",
            "--recompute-modules",
            "moe",
            "Drop one of them",
        )
    for other in ("--fsdp-trace-pool", "--megatron-fsdp-min-unit-numel", "--mtp-num-layers"):
        if found := getattr(args, other[2:].replace("-", "_")):
            _fail(flag, "a run without it", other, found, "Drop one of them")
    if args.sequence_parallel and (args.hidden_dropout or args.attention_dropout):
        found = args.hidden_dropout or args.attention_dropout
        name = "--hidden-dropout" if args.hidden_dropout else "--attention-dropout"
        _fail(
            flag, "0 with --sequence-parallel, under which plans draw equal masks on all ranks", name, found, "Set it"
        )
    has_chunks = args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank
    if args.pipeline_model_parallel_size > 1 and not has_chunks:
        cure = "Add it, or drop the overlap"
        _fail(flag, "several chunks a rank with stages", "--num-virtual-stages-per-pipeline-rank", "none", cure)


def _check_router(args: argparse.Namespace) -> None:
    topk = args.moe_router_topk
    if topk > args.num_experts:
        cure = "Change one of them"
        _fail("Router", f"at most --num-experts {args.num_experts}", "--moe-router-topk", topk, cure)
    is_softmax = args.moe_router_score_function == "softmax"
    is_sinkhorn = args.moe_router_load_balancing_type == "sinkhorn"
    if topk == 1 and is_softmax and not is_sinkhorn and not args.moe_router_pre_softmax:
        _fail(
            "Router",
            "2 or more, since a softmax over one expert is 1 whatever the router says",
            "--moe-router-topk",
            topk,
            "Raise it, or add --moe-router-pre-softmax",
        )
    if args.moe_router_enable_expert_bias and is_softmax:
        _fail(
            "Router",
            "--moe-router-score-function sigmoid",
            "--moe-router-enable-expert-bias",
            "softmax",
            "Change the function or drop the bias",
        )


def balances_by_loss(args: argparse.Namespace) -> bool:
    """Whether a loss on the router may spread tokens over experts."""
    return args.moe_router_load_balancing_type in BALANCED_BY_LOSS


def expert_config(args: argparse.Namespace) -> dict[str, object]:
    """Return the fields of megatron-core's config that describe experts; none for a model without."""
    if args.num_experts is None:
        return {}
    return {
        "num_moe_experts": args.num_experts,
        "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
        "moe_router_topk": args.moe_router_topk,
        "moe_router_pre_softmax": args.moe_router_pre_softmax,
        "moe_router_score_function": args.moe_router_score_function,
        "moe_router_load_balancing_type": args.moe_router_load_balancing_type,
        "moe_router_dtype": args.moe_router_dtype,
        "moe_router_enable_expert_bias": args.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": args.moe_router_bias_update_rate,
        "moe_aux_loss_coeff": args.moe_aux_loss_coeff,
        "moe_z_loss_coeff": args.moe_z_loss_coeff,
        "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        "overlap_moe_expert_parallel_comm": args.overlap_moe_expert_parallel_comm,
    }
