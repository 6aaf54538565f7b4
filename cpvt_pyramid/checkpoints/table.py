"""The formats of checkpoint files, a row each: how each names and shapes the tensors of our models.

It is read in both directions by `formats`. It needs no torch, so that commands can list it.
"""

from typing import NamedTuple


class Format(NamedTuple):
    """How a family of checkpoint files names and shapes the tensors of our models.

    Attributes:
        owners: whose files they are.
        archs: the variants that it has, patterns of names in `ARCHS` and `COLUMNAR_ARCHS`. It has
            all tensors of their patch embeddings and blocks.
        parts: of the parts of a model besides these (see `names`), those that it has; '*': all.
        names: pairs (ours, theirs). Each is the beginning of a name or, if it starts with a dot, a
            part inside of it. `{i}` is the index of a stage, `{j}` that of a block; `{i+1}` and
            `{j+1}` count from 1.
        official: the variants whose authors publish files in this format.
        timm: the variants that timm publishes in this format.
        linear: whether its models may have linear attention (PVTv2's `li`).
        in_proj: whether q and kv of global attention are one tensor, with rows [q; kv].
        split_kv: whether k and v of global attention are two tensors, `key` and `value`.
        pointwise: whether the MLP's linear layers are 1x1 convolutions.
        flat_tables: whether tables are (1, N, C) instead of (1, H, W, C).
        class_entry: whether the last table has an entry for the class token before the others.
        norm_of_last_stage: whether a norm of the last stage alone is the classifier's.
        prefix: of all names but those of the head, in files of whole classifiers.
    """

    owners: str
    archs: tuple[str, ...]
    parts: tuple[str, ...]
    names: tuple[tuple[str, str], ...] = ()
    official: tuple[str, ...] = ()
    timm: tuple[str, ...] = ()
    linear: bool = False
    in_proj: bool = False
    split_kv: bool = False
    pointwise: bool = False
    flat_tables: bool = False
    class_entry: bool = False
    norm_of_last_stage: bool = False
    prefix: str = ''


TWINS = 'pcpvt_*', 'svt_*'
PVT = 'pvt_tiny', 'pvt_small', 'pvt_medium', 'pvt_large'
PVT_V2 = 'pvt_v2_*', 'mit_*'
TWINS_PARTS = 'pos_block', 'norm_list', 'norm'
CLASSIFIER = 'cls_token', 'cls_pos', 'norm', 'head'
# Pairs of names that models of the mm packages have in common.
MM_MLP = (('.mlp.fc1.', '.ffn.layers.0.0.'), ('.mlp.fc2.', '.ffn.layers.1.'))
MM_PYRAMID = (
    ('patch_embeds.{i}.proj.', 'patch_embeds.{i}.projection.'),
    ('pos_block.{i}.proj.0.', 'position_encodings.{i}.proj.'),
    *MM_MLP,
)
FORMATS = {
    'ours': Format(
        'the authors of Twins; timm (`twins_*`); this package',
        archs=('*',),
        parts=('*',),
        official=('pcpvt_*', 'svt_*', 'cpvt_*'),
        timm=('pcpvt_*', 'svt_*', 'cpvt_*'),
    ),
    'mmseg': Format(
        'mmsegmentation (`PCPVT`, `SVT`)',
        archs=TWINS,
        parts=TWINS_PARTS,
        names=(*MM_PYRAMID, ('blocks.{i}.{j}.', 'layers.{i}.{j}.')),
        in_proj=True,
    ),
    'mmpretrain': Format(
        'mmpretrain (`PCPVT`, `SVT`)',
        archs=TWINS,
        parts=(*TWINS_PARTS, 'head'),
        names=(
            *MM_PYRAMID,
            ('blocks.{i}.{j}.', 'stages.{i}.{j}.'),
            ('norm_list.{i}.', 'norm_after_stage{i}.'),
            ('head.', 'head.fc.'),
        ),
        norm_of_last_stage=True,
        prefix='backbone.',
    ),
    'mm_pvt_v2': Format(
        'mmdetection (`PyramidVisionTransformerV2`), mmsegmentation (`MixVisionTransformer`)',
        archs=PVT_V2,
        parts=('norm_list',),
        names=(
            ('patch_embeds.{i}.proj.', 'layers.{i}.0.projection.'),
            ('patch_embeds.{i}.norm.', 'layers.{i}.0.norm.'),
            ('blocks.{i}.{j}.', 'layers.{i}.1.{j}.'),
            ('norm_list.{i}.', 'layers.{i}.2.'),
            ('.mlp.fc1.', '.ffn.layers.0.'),
            ('.mlp.dwconv.', '.ffn.layers.1.'),
            ('.mlp.fc2.', '.ffn.layers.4.'),
        ),
        in_proj=True,
        pointwise=True,
    ),
    'mmdet': Format(  # a stage is [patches, blocks]
        'mmdetection (`PyramidVisionTransformer`)',
        archs=PVT,
        parts=('pos_embeds',),
        names=(
            ('patch_embeds.{i}.proj.', 'layers.{i}.0.projection.'),
            ('patch_embeds.{i}.norm.', 'layers.{i}.0.norm.'),
            ('pos_embeds.{i}.table', 'layers.{i}.1.0.pos_embed'),
            ('blocks.{i}.{j}.', 'layers.{i}.1.{j+1}.'),
            ('.mlp.fc1.', '.ffn.layers.0.'),
            ('.mlp.fc2.', '.ffn.layers.3.'),
        ),
        in_proj=True,
        pointwise=True,
        flat_tables=True,
    ),
    'pvt_v2': Format(
        'the authors of PVTv2 and of SegFormer',
        archs=PVT_V2,
        parts=('norm_list', 'head'),
        official=PVT_V2,
        names=(
            ('patch_embeds.{i}.', 'patch_embed{i+1}.'),
            ('blocks.{i}.{j}.', 'block{i+1}.{j}.'),
            ('norm_list.{i}.', 'norm{i+1}.'),
            ('.mlp.dwconv.', '.mlp.dwconv.dwconv.'),
        ),
        linear=True,
    ),
    'timm_pvt_v2': Format(
        'timm (`pvt_v2_*`)',
        archs=PVT_V2,
        parts=('norm_list', 'head'),
        timm=('pvt_v2_*',),
        names=(
            ('patch_embeds.0.', 'patch_embed.'),
            ('patch_embeds.{i}.', 'stages.{i}.downsample.'),
            ('blocks.{i}.{j}.', 'stages.{i}.blocks.{j}.'),
            ('norm_list.{i}.', 'stages.{i}.norm.'),
        ),
        linear=True,
    ),
    'timm_pvt_v2_maps': Format(
        'timm (`pvt_v2_*` with `features_only=True`)',
        archs=PVT_V2,
        parts=('norm_list',),
        names=(
            ('patch_embeds.0.', 'patch_embed.'),
            ('patch_embeds.{i}.', 'stages_{i}.downsample.'),
            ('blocks.{i}.{j}.', 'stages_{i}.blocks.{j}.'),
            ('norm_list.{i}.', 'stages_{i}.norm.'),
        ),
        linear=True,
    ),
    'transformers': Format(
        'files of transformers (SegFormer)',
        archs=PVT_V2,
        parts=('norm_list', 'head'),
        names=(
            ('patch_embeds.{i}.proj.', 'encoder.patch_embeddings.{i}.proj.'),
            ('patch_embeds.{i}.norm.', 'encoder.patch_embeddings.{i}.layer_norm.'),
            ('blocks.{i}.{j}.', 'encoder.block.{i}.{j}.'),
            ('norm_list.{i}.', 'encoder.layer_norm.{i}.'),
            ('.norm1.', '.layer_norm_1.'),
            ('.norm2.', '.layer_norm_2.'),
            ('.attn.q.', '.attention.self.query.'),
            ('.attn.key.', '.attention.self.key.'),
            ('.attn.value.', '.attention.self.value.'),
            ('.attn.sr.', '.attention.self.sr.'),
            ('.attn.norm.', '.attention.self.layer_norm.'),
            ('.attn.proj.', '.attention.output.dense.'),
            ('.mlp.fc1.', '.mlp.dense1.'),
            ('.mlp.dwconv.', '.mlp.dwconv.dwconv.'),
            ('.mlp.fc2.', '.mlp.dense2.'),
            ('head.', 'classifier.'),
        ),
        split_kv=True,
        prefix='segformer.',
    ),
    'transformers_5': Format(
        'the modules of SegFormer in transformers 5',
        archs=PVT_V2,
        parts=('norm_list', 'head'),
        names=(
            ('patch_embeds.{i}.proj.', 'stages.{i}.patch_embeddings.proj.'),
            ('patch_embeds.{i}.norm.', 'stages.{i}.patch_embeddings.layer_norm.'),
            ('blocks.{i}.{j}.', 'stages.{i}.blocks.{j}.'),
            ('norm_list.{i}.', 'stages.{i}.layer_norm.'),
            ('.norm1.', '.layernorm_before.'),
            ('.norm2.', '.layernorm_after.'),
            ('.attn.q.', '.attention.q_proj.'),
            ('.attn.key.', '.attention.k_proj.'),
            ('.attn.value.', '.attention.v_proj.'),
            ('.attn.sr.', '.attention.sequence_reduction.sequence_reduction.'),
            ('.attn.norm.', '.attention.sequence_reduction.layer_norm.'),
            ('.attn.proj.', '.attention.o_proj.'),
            ('.mlp.dwconv.', '.mlp.dwconv.dwconv.'),
            ('head.', 'classifier.'),
        ),
        split_kv=True,
        prefix='segformer.',
    ),
    'transformers_pvt_v2': Format(
        'transformers (`PvtV2`)',
        archs=PVT_V2,
        parts=('norm_list', 'head'),
        names=(
            ('patch_embeds.{i}.proj.', 'encoder.layers.{i}.patch_embedding.proj.'),
            ('patch_embeds.{i}.norm.', 'encoder.layers.{i}.patch_embedding.layer_norm.'),
            ('blocks.{i}.{j}.', 'encoder.layers.{i}.blocks.{j}.'),
            ('norm_list.{i}.', 'encoder.layers.{i}.layer_norm.'),
            ('.norm1.', '.layer_norm_1.'),
            ('.norm2.', '.layer_norm_2.'),
            ('.attn.q.', '.attention.query.'),
            ('.attn.key.', '.attention.key.'),
            ('.attn.value.', '.attention.value.'),
            ('.attn.sr.', '.attention.spatial_reduction.'),
            ('.attn.norm.', '.attention.layer_norm.'),
            ('.attn.proj.', '.attention.proj.'),
            ('.mlp.fc1.', '.mlp.dense1.'),
            ('.mlp.dwconv.', '.mlp.dwconv.dwconv.'),
            ('.mlp.fc2.', '.mlp.dense2.'),
            ('head.', 'classifier.'),
        ),
        linear=True,
        split_kv=True,
        prefix='pvt_v2.',
    ),
    'transformers_pvt': Format(
        'transformers (`Pvt`)',
        archs=PVT,
        parts=('pos_embeds', *CLASSIFIER),
        names=(
            ('patch_embeds.{i}.proj.', 'encoder.patch_embeddings.{i}.projection.'),
            ('patch_embeds.{i}.norm.', 'encoder.patch_embeddings.{i}.layer_norm.'),
            ('pos_embeds.{i}.table', 'encoder.patch_embeddings.{i}.position_embeddings'),
            ('cls_token', 'encoder.patch_embeddings.3.cls_token'),
            ('blocks.{i}.{j}.', 'encoder.block.{i}.{j}.'),
            ('.norm1.', '.layer_norm_1.'),
            ('.norm2.', '.layer_norm_2.'),
            ('.attn.q.', '.attention.self.query.'),
            ('.attn.key.', '.attention.self.key.'),
            ('.attn.value.', '.attention.self.value.'),
            ('.attn.sr.', '.attention.self.sequence_reduction.'),
            ('.attn.norm.', '.attention.self.layer_norm.'),
            ('.attn.proj.', '.attention.output.dense.'),
            ('.mlp.fc1.', '.mlp.dense1.'),
            ('.mlp.fc2.', '.mlp.dense2.'),
            ('norm.', 'encoder.layer_norm.'),
            ('head.', 'classifier.'),
        ),
        split_kv=True,
        flat_tables=True,
        class_entry=True,
        prefix='pvt.',
    ),
    'pvt': Format(
        'the authors of PVT',
        archs=PVT,
        parts=('pos_embeds', *CLASSIFIER),
        official=PVT,
        names=(
            ('patch_embeds.{i}.', 'patch_embed{i+1}.'),
            ('pos_embeds.{i}.table', 'pos_embed{i+1}'),
            ('blocks.{i}.{j}.', 'block{i+1}.{j}.'),
        ),
        flat_tables=True,
        class_entry=True,
    ),
    'mmpretrain_vit': Format(
        'mmpretrain (`VisionTransformer`)',
        archs=('cpvt_*',),
        parts=('pos_embed', *CLASSIFIER),
        names=(
            ('patch_embed.proj.', 'patch_embed.projection.'),
            ('blocks.{j}.norm1.', 'layers.{j}.ln1.'),
            ('blocks.{j}.norm2.', 'layers.{j}.ln2.'),
            ('blocks.{j}.', 'layers.{j}.'),
            *MM_MLP,
            ('norm.', 'ln1.'),
            ('pos_embed.table', 'pos_embed'),
            ('head.', 'head.layers.head.'),
        ),
        flat_tables=True,
        class_entry=True,
        prefix='backbone.',
    ),
    'vit': Format(
        'the authors of DeiT; timm (`deit_*`, `vit_*`)',
        archs=('cpvt_*',),
        parts=('pos_embed', *CLASSIFIER),
        names=(('pos_embed.table', 'pos_embed'),),
        official=('cpvt_*',),
        timm=('cpvt_*',),
        flat_tables=True,
        class_entry=True,
    ),
}
