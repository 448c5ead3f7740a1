"""Which optimizer the parameters of public architectures get; built by hand, with public names."""

from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

import gossipgrad as gg

D, H, V = 8, 24, 11  # width, hidden width, size of the vocabulary


def tree(*own: tuple[str, tuple[int, ...]], **children: nn.Module | None) -> nn.Module:
    """A module of a user's own, with bare parameters and children."""
    module = nn.Module()
    for name, shape in own:
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    for name, child in children.items():
        module.add_module(name, child)
    return module


def blocks(make: Callable[[], nn.Module], count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(count))


def dense(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Conv1D(nn.Module):
    """Of the library transformers: inputs x outputs."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.zeros(nx, nf)), nn.Parameter(torch.zeros(nf))


class RMSNorm2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D, 5))


def tied(model: nn.Module, head: nn.Linear, embedding: nn.Embedding) -> nn.Module:
    head.weight = embedding.weight
    return model


def gpt2(layers: int = 2) -> nn.Module:
    def block() -> nn.Module:
        return tree(
            ln_1=nn.LayerNorm(D),
            attn=tree(c_attn=Conv1D(3 * D, D), c_proj=Conv1D(D, D)),
            ln_2=nn.LayerNorm(D),
            mlp=tree(c_fc=Conv1D(4 * D, D), c_proj=Conv1D(D, 4 * D)),
        )

    wte, head = nn.Embedding(V, D), dense(D, V)
    body = tree(wte=wte, wpe=nn.Embedding(5, D), h=blocks(block, layers), ln_f=nn.LayerNorm(D))
    return tied(tree(transformer=body, lm_head=head), head, wte)


def nano_gpt() -> nn.Module:
    """One block, and logits by the embedding: no layer is the head."""

    def block() -> nn.Module:
        attn = tree(c_attn=dense(D, 3 * D), c_proj=dense(D, D))
        return tree(attn=attn, mlp=tree(c_fc=dense(D, 4 * D), c_proj=dense(4 * D, D)))

    return tree(("pos_emb", (1, 5, D)), wte=nn.Embedding(V, D), h=blocks(block, 1))


def llama_layer(**mlp: nn.Module) -> nn.Module:
    return tree(
        self_attn=tree(
            q_proj=dense(D, D), k_proj=dense(D, 4), v_proj=dense(D, 4), o_proj=dense(D, D)
        ),
        input_layernorm=nn.RMSNorm(D),
        **(mlp or {"mlp": swiglu()}),
    )


def swiglu() -> nn.Module:
    return tree(gate_proj=dense(D, H), up_proj=dense(D, H), down_proj=dense(H, D))


def llama(layers: int = 2, **mlp: Callable[[], nn.Module]) -> nn.Module:
    def layer() -> nn.Module:
        return llama_layer(**{name: make() for name, make in mlp.items()})

    body = tree(embed_tokens=nn.Embedding(V, D), layers=blocks(layer, layers), norm=nn.RMSNorm(D))
    return tree(model=body, lm_head=dense(D, V))


def mixtral() -> nn.Module:
    """Experts in one parameter each, as of transformers 5."""
    return llama(
        mlp=lambda: tree(
            gate=tree(("weight", (4, D))),
            experts=tree(("gate_up_proj", (4, 2 * H, D)), ("down_proj", (4, D, H))),
        )
    )


def qwen_moe() -> nn.Module:
    return llama(
        mlp=lambda: tree(
            gate=dense(D, 4),
            experts=blocks(swiglu, 4),
            shared_expert=swiglu(),
            shared_expert_gate=dense(D, 1),
        )
    )


def switch_layer() -> nn.Module:
    experts = nn.ModuleDict({f"expert_{i}": tree(wi=dense(D, H), wo=dense(H, D)) for i in range(4)})
    return tree(mlp=tree(router=tree(classifier=dense(D, 4)), experts=experts))


def bert() -> nn.Module:
    def layer() -> nn.Module:
        attention = {
            "self": tree(query=nn.Linear(D, D), key=nn.Linear(D, D), value=nn.Linear(D, D)),
            "output": tree(dense=nn.Linear(D, D), LayerNorm=nn.LayerNorm(D)),
        }
        return tree(
            attention=tree(**attention),
            intermediate=tree(dense=nn.Linear(D, H)),
            output=tree(dense=nn.Linear(H, D)),
        )

    words, decoder = nn.Embedding(V, D), nn.Linear(D, V)
    embeddings = tree(
        word_embeddings=words,
        position_embeddings=nn.Embedding(5, D),
        token_type_embeddings=nn.Embedding(2, D),
        LayerNorm=nn.LayerNorm(D),
    )
    body = tree(
        embeddings=embeddings,
        encoder=tree(layer=blocks(layer)),
        pooler=tree(dense=nn.Linear(D, D)),
    )
    predictions = tree(transform=tree(dense=nn.Linear(D, D)), decoder=decoder)
    cls = tree(predictions=predictions, seq_relationship=nn.Linear(D, 2))
    return tied(tree(bert=body, cls=cls), decoder, words)


def t5() -> nn.Module:
    def attention(bias: bool) -> nn.Module:
        table = nn.Embedding(4, 2) if bias else None
        return tree(**{name: dense(D, D) for name in "qkvo"}, relative_attention_bias=table)

    def stack() -> nn.Module:
        def block(first: bool) -> nn.Module:
            ff = tree(wi_0=dense(D, H), wi_1=dense(D, H), wo=dense(H, D))
            layers = [tree(SelfAttention=attention(first)), tree(DenseReluDense=ff)]
            return tree(layer=nn.ModuleList(layers))

        return tree(block=nn.ModuleList([block(True), block(False)]), norm=nn.RMSNorm(D))

    return tree(shared=nn.Embedding(V, D), encoder=stack(), decoder=stack(), lm_head=dense(D, V))


def vit() -> nn.Module:
    def block() -> nn.Module:
        return tree(
            ("ls1", (D,)),
            norm1=nn.LayerNorm(D),
            attn=tree(qkv=nn.Linear(D, 3 * D), proj=nn.Linear(D, D)),
            mlp=tree(fc1=nn.Linear(D, 4 * D), fc2=nn.Linear(4 * D, D)),
        )

    return tree(
        ("cls_token", (1, 1, D)),
        ("pos_embed", (1, 5, D)),
        patch_embed=tree(proj=nn.Conv2d(3, D, 4, 4)),
        blocks=nn.Sequential(block(), block()),
        head=nn.Linear(D, 10),
    )


def swin() -> nn.Module:
    def block() -> nn.Module:
        attn = tree(
            ("relative_position_bias_table", (9, 2)),
            qkv=nn.Linear(D, 3 * D),
            proj=nn.Linear(D, D),
        )
        return tree(attn=attn, mlp=tree(fc1=nn.Linear(D, H), fc2=nn.Linear(H, D)))

    stage = tree(blocks=blocks(block), downsample=tree(reduction=dense(4 * D, 2 * D)))
    head = tree(fc=nn.Linear(2 * D, 10))
    return tree(
        patch_embed=tree(proj=nn.Conv2d(3, D, 4, 4)), layers=nn.ModuleList([stage]), head=head
    )


def mamba() -> nn.Module:
    def layer() -> nn.Module:
        mixer = tree(
            ("A_log", (2 * D, 4)),
            ("D", (2 * D,)),
            in_proj=dense(D, 4 * D),
            conv1d=nn.Conv1d(2 * D, 2 * D, 4, groups=2 * D, padding=3),
            x_proj=dense(2 * D, 9),
            dt_proj=nn.Linear(2, 2 * D),
            out_proj=dense(2 * D, D),
        )
        return tree(norm=nn.RMSNorm(D), mixer=mixer)

    embeddings, head = nn.Embedding(V, D), dense(D, V)
    body = tree(embeddings=embeddings, layers=blocks(layer), norm_f=nn.RMSNorm(D))
    return tied(tree(backbone=body, lm_head=head), head, embeddings)


def rwkv() -> nn.Module:
    def block() -> nn.Module:
        att = tree(
            ("time_decay", (2, 4)),
            ("time_faaaa", (2, 4)),
            ("time_mix_key", (1, 1, D)),
            **{name: dense(D, D) for name in ("receptance", "key", "value", "gate", "output")},
            ln_x=nn.GroupNorm(2, D),
        )
        ffn = tree(
            ("time_mix_key", (1, 1, D)),
            key=dense(D, H),
            receptance=dense(D, D),
            value=dense(H, D),
        )
        return tree(ln1=nn.LayerNorm(D), att=att, ffn=ffn)

    return tree(emb=nn.Embedding(V, D), blocks=blocks(block), head=dense(D, V))


def resnet() -> nn.Module:
    def block(inputs: int) -> nn.Module:
        down = nn.Sequential(nn.Conv2d(inputs, D, 1), nn.BatchNorm2d(D)) if inputs != D else None
        return tree(
            conv1=nn.Conv2d(inputs, D, 3),
            bn1=nn.BatchNorm2d(D),
            conv2=nn.Conv2d(D, D, 3, groups=2),
            downsample=down,
        )

    layer = nn.Sequential(block(4), block(D))
    return tree(conv1=nn.Conv2d(3, 4, 7), bn1=nn.BatchNorm2d(4), layer1=layer, fc=nn.Linear(D, 10))


def mobile_net() -> nn.Module:
    def block() -> nn.Module:
        conv = nn.Sequential(
            nn.Sequential(nn.Conv2d(D, H, 1), nn.BatchNorm2d(H)),
            nn.Sequential(nn.Conv2d(H, H, 3, groups=H), nn.BatchNorm2d(H)),
            nn.Conv2d(H, D, 1),
            nn.BatchNorm2d(D),
        )
        return tree(conv=conv)

    features = nn.Sequential(nn.Conv2d(3, D, 3), block(), block())
    return tree(features=features, classifier=nn.Sequential(nn.Dropout(), nn.Linear(D, 10)))


def u_net() -> nn.Module:
    """The time embedding's layers come last, and are hidden."""
    return tree(
        conv_in=nn.Conv2d(3, D, 3),
        down=nn.ModuleList([nn.Conv2d(D, H, 3, 2)]),
        mid_attn=tree(norm=RMSNorm2d(), to_qkv=nn.Conv2d(H, 3 * D, 1), to_out=nn.Conv2d(D, H, 1)),
        up=nn.ModuleList([nn.ConvTranspose2d(H, D, 4, 2)]),
        conv_out=nn.Conv2d(D, 3, 1),
        time_mlp=nn.Sequential(nn.Linear(D, H), nn.SiLU(), nn.Linear(H, D)),
    )


def wave_net() -> nn.Module:
    def layer() -> nn.Module:
        return tree(
            dilated=parametrizations.weight_norm(nn.Conv1d(D, 2 * D, 2)),
            residual=weight_norm(nn.Conv1d(D, D, 1)),
        )

    return tree(
        start=nn.Conv1d(1, D, 1),
        upsample=weight_norm(nn.ConvTranspose1d(D, D, 4)),
        layers=blocks(layer),
        end_conv_1=nn.Conv1d(D, H, 1),
        end_conv_2=parametrizations.weight_norm(nn.Conv1d(H, 256, 1)),
    )


def critic() -> nn.Module:
    norm = parametrizations.spectral_norm
    return nn.Sequential(
        *(norm(nn.Conv2d(3, D, 3)), nn.ReLU(), norm(nn.Conv2d(D, H, 3)), nn.Flatten()),
        norm(nn.Linear(H, 2)),
    )


def dino_head(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    mlp = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))
    return tree(mlp=mlp, last_layer=norm(dense(D, 64)))


def word_lstm() -> nn.Module:
    return tree(encoder=nn.Embedding(V, D), rnn=nn.LSTM(D, D), decoder=nn.Linear(D, V))


def clip_text() -> nn.Module:
    def block() -> nn.Module:
        mlp = tree(c_fc=nn.Linear(D, 4 * D), c_proj=nn.Linear(4 * D, D))
        return tree(attn=nn.MultiheadAttention(D, 2), ln_1=nn.LayerNorm(D), mlp=mlp)

    return tree(
        ("positional_embedding", (5, D)),
        ("text_projection", (D, D)),
        ("logit_scale", ()),
        transformer=tree(resblocks=nn.Sequential(block(), block())),
        token_embedding=nn.Embedding(V, D),
    )


def actor_critic() -> nn.Module:
    return tree(
        body=nn.Sequential(nn.Linear(4, H), nn.Tanh(), nn.Linear(H, H)),
        actor=nn.Linear(H, 3),
        critic=nn.Linear(H, 1),
    )


LLAMA = ["*_proj.weight"]
# Patterns of what is polarised; AdamW has everything else.
TABLE: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "GPT-2": (gpt2, ["transformer.h.*.c_*.weight"]),
    "nanoGPT, one block": (nano_gpt, ["h.*.weight"]),
    "Llama": (llama, LLAMA),
    "Llama, one layer": (lambda: llama(1), LLAMA),
    "Mixtral": (mixtral, ["*_proj.weight", "*.experts.*_proj"]),
    "Qwen-MoE": (qwen_moe, ["*_proj.weight"]),
    "Switch": (
        lambda: tree(layers=blocks(switch_layer), lm_head=dense(D, V)),
        ["*.wi.weight", "*.wo.weight"],
    ),
    "BERT": (bert, ["bert.*.dense.weight", "*.self.*.weight", "*.transform.dense.weight"]),
    "T5": (t5, ["*Attention.[qkvo].weight", "*.DenseReluDense.*.weight"]),
    "ViT": (vit, ["patch_embed.proj.weight", "*.attn.*.weight", "*.mlp.*.weight"]),
    "Swin": (
        swin,
        ["patch_embed.proj.weight", "*.attn.*.weight", "*.mlp.*.weight", "*.reduction.weight"],
    ),
    "Mamba": (mamba, ["*.*_proj.weight"]),
    "RWKV": (rwkv, ["*.att.[rkvgo]*.weight", "*.ffn.*.weight"]),
    "ResNeXt": (resnet, ["*conv?.weight", "*.downsample.0.weight"]),
    "MobileNetV2": (
        mobile_net,
        ["features.0.weight", "features.*.conv.0.0.weight", "features.*.conv.2.weight"],
    ),
    "U-Net": (
        u_net,
        [
            "conv_in.weight",
            "down.*.weight",
            "up.*.weight",
            "mid_attn.to_*.weight",
            "time_mlp.?.weight",
        ],
    ),
    "WaveNet": (
        wave_net,
        [
            *("upsample.weight_v", "layers.*.residual.weight_v", "end_conv_1.weight"),
            "layers.*.dilated.parametrizations.weight.original1",
        ],
    ),
    "SNGAN critic": (critic, ["[02].parametrizations.weight.original"]),
    "DINO head": (lambda: dino_head(parametrizations.weight_norm), ["mlp.*.weight"]),
    "DINO head, older norm": (lambda: dino_head(weight_norm), ["mlp.*.weight"]),
    "LSTM": (word_lstm, ["rnn.weight_*"]),
    "CLIP": (
        clip_text,
        ["*.attn.in_proj_weight", "*.attn.out_proj.weight", "*.c_*.weight", "text_projection"],
    ),
    "actor and critic": (actor_critic, ["body.*.weight"]),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("name", TABLE)
def test_every_parameter_of_a_public_architecture(name):
    make, polarised = TABLE[name]
    model = make()
    roles = {
        parameter: group["role"]
        for group in gg.Muon(model).param_groups
        for parameter in group["param_names"]
    }
    found = {each for each, role in roles.items() if role == "muon"}
    vectors = {each for each, p in model.named_parameters() if p.ndim < 2}
    expected = {n for n in roles if any(fnmatchcase(n, pattern) for pattern in polarised)} - vectors
    assert found == expected
    assert set(roles) == {each for each, _ in model.named_parameters()}
