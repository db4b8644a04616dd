"""Compare models of third-party packages with eager, forward and backward: results, gradients and buffers.

    pip install --no-deps timm torchvision x-transformers vit-pytorch diffusers torch-geometric kornia kornia-rs \\
        einops einx frozendict loguru torch-einops-utils local-attention performer-pytorch axial-positional-embedding \\
        product-key-memory colt5-attention mambapy soft-moe-pytorch hyper-connections rotary-embedding-torch \\
        transformers
    python benchmarks/other_packages.py                     # every model whose package is installed, one process each
    python benchmarks/other_packages.py --only timm. --dtype float64
    python benchmarks/other_packages.py --only transformers. --device cuda --dtype bfloat16 --jobs 12
    python benchmarks/other_packages.py --only transformers. --ranks 2      # sharded by FSDP2, block by block
    python benchmarks/other_packages.py --only transformers. --ranks 2 --dtype bfloat16  # of float32 parameters

Models are small, with random weights, in training mode, and are called twice (so that running averages change);
compared_models.py says how they are compared. A model that fails in eager mode is "no case": small sizes do not suit
every class of transformers, and FSDP2 does not suit a block that is not called as a module.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import small_transformers  # beside this file
import torch
import torch.distributed as dist
from compared_models import ALLOWED, Model, judged, verdict  # beside this file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

_TIMM = """
test_vit test_vit2 test_vit3 test_vit4 test_resnet test_efficientnet test_efficientnet_gn test_efficientnet_ln
test_efficientnet_evos test_byobnet test_convnext test_convnext2 test_convnext3 test_mambaout test_nfnet
swin_tiny_patch4_window7_224 maxvit_rmlp_pico_rw_256 coatnet_pico_rw_224 mobilenetv3_small_050 ghostnet_050
regnetx_002 mobileone_s0 edgenext_xx_small repvit_m0_9 efficientvit_b0 poolformer_s12 volo_d1_224 xcit_nano_12_p16_224
levit_128s pit_ti_224 cait_xxs24_224 twins_pcpvt_small mixer_s32_224 gmlp_ti16_224 resmlp_12_224 visformer_tiny
crossvit_tiny_240 davit_tiny focalnet_tiny_srf inception_next_tiny lambda_resnet26t halonet26t botnet26t_256
hiera_tiny_224 starnet_s1 tiny_vit_5m_224 mvitv2_tiny eva02_tiny_patch14_224
""".split()

_TORCHVISION = """
resnet18 shufflenet_v2_x0_5 squeezenet1_0 densenet121 mnasnet0_5 googlenet vgg11_bn efficientnet_b0 swin_v2_t
convnext_tiny
""".split()

_X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "rotary": {"rotary_pos_emb": True},
    "partial rotary": {"rotary_pos_emb": True, "rotary_emb_dim": 8},
    "xpos": {"rotary_xpos": True},
    "alibi": {"alibi_pos_bias": True},
    "data-dependent alibi": {"attn_data_dependent_alibi": True},
    "t5 bias": {"rel_pos_bias": True},
    "swiglu": {"ff_glu": True, "ff_swish": True},
    "relu squared": {"ff_relu_squared": True},
    "rmsnorm": {"use_rmsnorm": True},
    "rmsnorm without weights": {"use_simple_rmsnorm": True},
    "scalenorm": {"use_scalenorm": True},
    "dynamic tanh": {"use_dynamic_tanh": True},
    "qk norm": {"attn_qk_norm": True},
    "qk norm by dim": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "top-k attention": {"attn_sparse_topk": 4},
    "top-k attention, straight through": {"attn_sparse_topk": 3, "attn_sparse_topk_straight_through": True},
    "sandwich": {"sandwich_coef": 1},
    "macaron": {"macaron": True},
    "gated residual": {"gate_residual": True},
    "scaled residual": {"scale_residual": True},
    "residual attention": {"residual_attn": True},
    "hyper-connections": {"num_residual_streams": 2},
    "shifted tokens": {"shift_tokens": 1},
    "one key head": {"attn_one_kv_head": True},
    "grouped queries": {"attn_kv_heads": 1},
    "memory keys": {"attn_num_mem_kv": 4},
    "gated values": {"attn_gate_values": True},
    "value residual": {"add_value_residual": True},
    "head scale": {"attn_head_scale": True},
    "attention on attention": {"attn_on_attn": True},
    "laser": {"attn_laser": True},
    "softclamp": {"attn_softclamp_logits": True},
    "signed": {"attn_cog_signed": True},
    "selective": {"attn_selective": True},
    "sigmoid attention": {"attn_sigmoid": True},
    "norm after activation": {"ff_no_bias": True, "ff_post_act_ln": True},
}

_VIT = {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
_VIT_PYTORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", _VIT),
    "simple_vit": ("SimpleViT", _VIT),
    "deepvit": ("DeepViT", _VIT),
    "parallel_vit": ("ViT", _VIT),
    "simple_vit_with_register_tokens": ("SimpleViT", _VIT),
    "simple_vit_with_qk_norm": ("SimpleViT", _VIT),
    "simple_vit_with_fft": ("SimpleViT", _VIT | {"freq_patch_size": 8}),
    "simple_flash_attn_vit": ("SimpleViT", _VIT),
    "vit_for_small_dataset": ("ViT", _VIT),
    "vit_with_patch_dropout": ("ViT", _VIT),
    "vit_with_decorr": ("ViT", _VIT),
    "learnable_memory_vit": ("ViT", _VIT),
    "cait": ("CaiT", _VIT | {"cls_depth": 1}),
    "nest": (
        "NesT",
        {"image_size": 64, "patch_size": 4, "dim": 32, "heads": 2, "num_hierarchies": 3, "block_repeats": (1, 1, 1)}
        | {"num_classes": 10},
    ),
    "cct": ("CCT", {"img_size": 64, "embedding_dim": 64, "n_conv_layers": 2, "num_layers": 2, "num_heads": 2}),
    "pit": ("PiT", _VIT | {"patch_size": 8, "depth": (1, 1)}),
    "levit": (
        "LeViT",
        {"image_size": 64, "num_classes": 10, "stages": 2, "dim": (32, 48), "depth": 1, "heads": (2, 3), "mlp_mult": 2},
    ),
    "max_vit": (
        "MaxViT",
        {"num_classes": 10, "dim_conv_stem": 16, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4},
    ),
}

_GRAPH_NETWORKS: dict[str, dict[str, Any]] = {
    "GCN": {},
    "GAT": {"heads": 2},
    "GIN": {},
    "GraphSAGE": {},
    "EdgeCNN": {},
    "PNA": {
        "aggregators": ["mean", "max", "std"],
        "scalers": ["identity", "amplification"],
        "deg": torch.tensor([1, 2, 3, 4]),
    },
}

_IMAGE_FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gaussian blur": lambda K, x: K.filters.gaussian_blur2d(x, (5, 5), (1.5, 1.5)),
    "sobel": lambda K, x: K.filters.sobel(x),
    "ssim": lambda K, x: K.metrics.ssim(x, x.flip(-1), 5),
    "lab": lambda K, x: K.color.rgb_to_lab(x),
    "hsv": lambda K, x: K.color.rgb_to_hsv(x),
    "rotate": lambda K, x: K.geometry.rotate(x, torch.tensor([30.0, 60.0], dtype=x.dtype)),
    "erosion": lambda K, x: K.morphology.erosion(x, torch.ones(3, 3, dtype=x.dtype)),
    "median": lambda K, x: K.filters.median_blur(x, (3, 3)),
    "canny": lambda K, x: K.filters.canny(x)[0],
    "harris": lambda K, x: K.feature.harris_response(x),
    "equalize": lambda K, x: K.enhance.equalize_clahe(x),
    "distance": lambda K, x: K.contrib.distance_transform(x),
}


class ImageFunction(nn.Module):
    """A function of kornia on an image scaled by one weight per channel."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(3, 1, 1)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(importlib.import_module("kornia"), x.sigmoid() * self.weight)


def _timm(name: str) -> Model:
    model = importlib.import_module("timm").create_model(name, num_classes=10)
    return model, (torch.randn(2, *model.default_cfg["input_size"]),), {}


def _torchvision(name: str) -> Model:
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    model = importlib.import_module("torchvision.models").get_model(name, weights=None, num_classes=10, **options)
    return model, (torch.randn(2, 3, 64, 64),), {}


def _x_transformer(options: dict[str, Any]) -> Model:
    package = importlib.import_module("x_transformers")
    layers = package.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
    model = package.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)
    return model, (torch.randint(0, 50, (2, 24)),), {}


def _vit_pytorch(module: str, name: str, options: dict[str, Any]) -> Model:
    model = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)(**options)
    return model, (torch.randn(2, 3, 64, 64),), {}


def _graph_network(name: str, options: dict[str, Any]) -> Model:
    package = importlib.import_module("torch_geometric.nn")
    model = getattr(package, name)(in_channels=16, hidden_channels=16, num_layers=2, out_channels=8, **options)
    return model, (torch.randn(20, 16), torch.randint(0, 20, (2, 60))), {}


def _image_function(function: Callable[[Any, Tensor], Tensor]) -> Model:
    return ImageFunction(function), (torch.randn(2, 3, 24, 24),), {}


def _unet() -> Model:
    model = importlib.import_module("diffusers").UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    return model, (torch.randn(2, 4, 16, 16), torch.tensor([3, 77]), torch.randn(2, 7, 32)), {}


def _autoencoder() -> Model:
    model = importlib.import_module("diffusers").AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        latent_channels=4,
    )
    return model, (torch.randn(2, 3, 32, 32),), {}


def _flux() -> Model:
    model = importlib.import_module("diffusers").FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    named = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(6, 3),
    }
    return model, (), named


def _video_transformer() -> Model:
    model = importlib.import_module("diffusers").WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    named = {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(2, 6, 16),
        "timestep": torch.tensor([3, 7]),
    }
    return model, (), named


def _local_attention() -> Model:
    package = importlib.import_module("local_attention")
    model = package.LocalTransformer(
        num_tokens=50, dim=32, depth=2, max_seq_len=64, local_attn_window_size=16, heads=2, dim_head=16, causal=True
    )
    return model, (torch.randint(0, 50, (2, 64)),), {}


def _performer() -> Model:
    package = importlib.import_module("performer_pytorch")
    sizes = {"num_tokens": 50, "max_seq_len": 32, "dim": 32, "depth": 2, "heads": 2, "dim_head": 16}
    model = package.PerformerLM(**sizes, nb_features=16, feature_redraw_interval=None)
    return model, (torch.randint(0, 50, (2, 32)),), {}


def _product_keys() -> Model:
    model = importlib.import_module("product_key_memory").PKM(dim=32, heads=2, num_keys=8, topk=4, dim_head=16)
    return model, (torch.randn(2, 12, 32),), {}


def _mamba() -> Model:
    package = importlib.import_module("mambapy.mamba")
    return package.Mamba(package.MambaConfig(d_model=16, n_layers=2, d_state=4)), (torch.randn(2, 16, 16),), {}


def _soft_experts() -> Model:
    model = importlib.import_module("soft_moe_pytorch").SoftMoE(dim=32, seq_len=16, num_experts=4)
    return model, (torch.randn(2, 16, 32),), {}


def models() -> Iterator[tuple[str, str, Callable[[], Model]]]:
    """Yield (name, required package, function that makes the model) of each model."""
    for name in _TIMM:
        yield f"timm.{name}", "timm", functools.partial(_timm, name)
    for name in _TORCHVISION:
        yield f"torchvision.{name}", "torchvision", functools.partial(_torchvision, name)
    for name, options in _X_TRANSFORMERS.items():
        yield f"x-transformers.{name}", "x_transformers", functools.partial(_x_transformer, options)
    for module, (name, options) in _VIT_PYTORCH.items():
        yield f"vit-pytorch.{module}", "vit_pytorch", functools.partial(_vit_pytorch, module, name, options)
    for name, options in _GRAPH_NETWORKS.items():
        yield f"torch-geometric.{name}", "torch_geometric", functools.partial(_graph_network, name, options)
    for name, function in _IMAGE_FUNCTIONS.items():
        yield f"kornia.{name}", "kornia", functools.partial(_image_function, function)
    yield "diffusers.UNet2DCondition", "diffusers", _unet
    yield "diffusers.AutoencoderKL", "diffusers", _autoencoder
    yield "diffusers.Flux", "diffusers", _flux
    yield "diffusers.Wan", "diffusers", _video_transformer
    yield "local-attention", "local_attention", _local_attention
    yield "performer", "performer_pytorch", _performer
    yield "product-key-memory", "product_key_memory", _product_keys
    yield "mambapy", "mambapy", _mamba
    yield "soft-moe", "soft_moe_pytorch", _soft_experts
    if importlib.util.find_spec("transformers"):
        for name in small_transformers.names():
            yield f"transformers.{name}", "transformers", functools.partial(small_transformers.small, name)


def _import_torchvision() -> None:
    """Import torchvision, if it is installed, also where its library does not load (for example because it needs CUDA):
    its operators, which no model here calls, must be declared for that."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _judge(name: str, dtype: torch.dtype, device: str) -> str:
    """Return the line about one model."""
    _import_torchvision()
    return judged(name, _build(name), dtype, device)


def _judge_sharded(name: str, dtype: torch.dtype, device: str) -> str:
    """Return the line about one model that is sharded among the ranks that torchrun started: the worst of all ranks."""
    _import_torchvision()
    rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(timeout=timedelta(seconds=60))

    def build() -> Model:
        model, *_ = _build(name)()
        torch.manual_seed(1 + rank)
        _, given, named = _build(name)()
        return model, given, named

    lines = [""] * dist.get_world_size()
    computes_in = dtype if dtype is torch.bfloat16 else None
    stored = torch.float32 if computes_in else dtype
    shard = functools.partial(_shard_blocks, policy=MixedPrecisionPolicy(computes_in, computes_in and torch.float32))
    dist.all_gather_object(lines, judged(name, build, stored, device, shard=shard, computes_in=computes_in))
    dist.destroy_process_group()
    worst_first = ("WRONG", "failed", "no case", "right")
    return min(lines, key=lambda line: worst_first.index(verdict(line)))


def _build(name: str) -> Callable[[], Model]:
    return next(build for label, _, build in models() if label == name)


def _shard_blocks(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Shard each block of the outermost lists of modules, and what remains of `model`."""
    for child in (*_blocks(model), model):
        fully_shard(child, mp_policy=policy)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    lists = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict  # these cannot be called
    for child in module.children():
        in_list = isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, lists)
        if in_list and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _blocks(child)


def _run(name: str, options: argparse.Namespace) -> str:
    """Return the line about one model, which is judged in its own process, or in one for each rank."""
    launcher = [sys.executable]
    if options.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    command = [*launcher, __file__, "--one", name, "--dtype", options.dtype, "--device", options.device]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds)
        said = (ran.stdout if ran.returncode == 0 else ran.stderr).splitlines()
        last = next((line.strip() for line in reversed(said) if line.strip("=- ")), "without output")
    except subprocess.TimeoutExpired:
        last = f"no end within {options.seconds:.0f} s"
    return last if verdict(last) != "ended" else f"ended {name:48} {last}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only models whose names begin with this")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every Nth of these models, from the Ith")
    parser.add_argument("--dtype", choices=ALLOWED, default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=1, help="shard each model among so many (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="limit for one model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sharded = dist.is_torchelastic_launched()
        line = (_judge_sharded if sharded else _judge)(options.one, getattr(torch, options.dtype), options.device)
        if not sharded or os.environ["RANK"] == "0":
            print(line)
        return
    asked = [
        name for name, package, _ in models() if name.startswith(options.only) and importlib.util.find_spec(package)
    ]
    part, parts = map(int, options.part.split("/"))
    asked = asked[part::parts]
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        for line in pool.map(functools.partial(_run, options=options), asked):
            counts[verdict(line)] += 1
            print(line, flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


if __name__ == "__main__":
    main()
