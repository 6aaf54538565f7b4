"""Tests that are skipped in an environment, by what it lacks: with older versions of torch (or on
Python 3.9, with the oldest), with the original mmengine, and without onnx."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import pytest

from cpvt_pyramid.versions import VERSION

LACKS_BELOW_2_9 = {
    'operations on fake CUDA tensors': """
        core/test_fake_gpu.py::test_the_forward_pass core/test_fake_gpu.py::test_the_pass
        core/test_fake_gpu.py::test_no_attention_casts core/test_fake_gpu.py::test_a_model_that
        mm/test_fake_gpu.py::test_the_forward_pass mm/test_fake_gpu.py::test_only_the_first""",
    'guards that can be left out of exported graphs': """
        core/test_export.py::test_the_graph_of_the_docs core/test_export.py::test_torch_export[svt
        core/test_export.py::test_torch_export_of_a_padded_batch[svt""",
    'tuples with names, replaced in exported graphs': 'core/test_export.py::test_torch_export[rope',
    'sizes known to be multiples, in compilers': 'core/test_export.py::test_a_compiled_model',
}
LACKS_BELOW_2_7 = {
    'the fast operations': """
        acceleration/ core/test_export.py::test_compiled mm/test_winograd.py
        core/test_recompute.py::test_an_accelerated core/test_rows.py::test_accelerated
        core/test_rows.py::test_a_new_attention core/test_rows.py::test_a_filter
        benchmarks/test_scaling.py::test_all
        app/training/test_train.py::test_a_training_on_a_cpu_is_accelerated""",
    'setuptools that reads this pyproject.toml': """
        mm/test_configs.py::test_installed_package_holds_what_mim_reads""",
    'float16 on CPUs': """
        core/test_contract.py::test_no_nan_in_any_precision
        core/test_layer_norms.py::test_gradients[float16
        position/test_position.py::test_inside_attention_in_half_precision
        padding/test_mask.py::test_a_learned_position_under_autocast
        padding/test_mask.py::test_means_of_large_maps""",
    'torch.export for several sizes': """
        core/test_export.py::test_torch_export core/test_rows.py::test_exported
        position/test_position.py::test_inside_attention_exports
        tasks/test_detectors.py::test_a_graph_of_semantic_fpn
        mm/test_backbone.py::test_exported_graphs""",
    'a compiler for all that we do': """
        padding/test_mask.py::test_sizes_are_read_only_where_that_waits_for_nothing[compiled
        core/test_paths.py::test_maps_and_gradients_are_the_same[pcpvt-compiled
        core/test_paths.py::test_maps_and_gradients_are_the_same[svt-compiled
        core/test_paths.py::test_maps_and_gradients_are_the_same[pvt_v2-compiled
        core/test_paths.py::test_maps_and_gradients_are_the_same[linear-compiled
        core/test_paths.py::test_maps_and_gradients_are_the_same[columnar-compiled
        tasks/test_detectors.py::test_compiled
        mm/test_padded_batches.py::test_compiled""",
    'compilers that trace contexts and custom functions': """
        core/test_bfloat16.py::test_graphs core/test_layer_norms.py::test_graphs
        core/test_recompute.py::test_what_else""",
    'a choice of the kernel of attention': """
        core/test_other_peoples_layers.py::test_per_sample core/test_transforms.py
        core/test_recompute.py::test_functions_of_torch_func_on_a_model""",
    'files of more than tensors, read safely': """
        checkpoints/test_loading.py::test_a_quantized_models_own_state
        app/predict/test_openmmlab_loading.py::test_checkpoints_with_options""",
    'sharded tensors': 'checkpoints/test_loading.py::test_a_sharded_tensor_in_a_file',
    'refusal of TorchScript': """
        checkpoints/test_reading.py::test_files_that_are_no_checkpoints[write_script""",
    'the newest huggingface_hub': 'checkpoints/test_loading.py::test_a_sharded_checkpoint',
    "names of classes in Python's errors of arguments": """
        app/training/test_mistakes.py::test_in_a_run[train-train_dataloader.dataset.pipeline.2.scal""",
    'sys.stdlib_module_names': 'tasks/test_detectors.py::test_torchvision_is_all',
    'the newest timm': 'position/test_position.py::test_rope_is_timms',
    'errors of locks': 'app/tooling/test_files.py::test_a_file_system_without_locks',
}


LACKS_WITHOUT_ONNX = {
    'onnx and onnxruntime': """
        core/test_main.py::test_lines_begin_with
        checkpoints/test_downloads.py::test_tools_take_names_or_say_why_not""",
}
# From torch 2.6 on, `torch.load` reads nothing else unless it is told to.
LACKS_WITH_ORIGINAL_MMENGINE = {
    'an mmengine that reads files of more than tensors': """
        core/test_timm_models.py::test_pretraining_from_images""",
}


def lacks_here() -> dict[str, str]:
    """What this environment lacks, and the beginnings of the names of tests that need it."""
    lacks: dict[str, str] = {}
    if VERSION < (2, 9):
        lacks |= LACKS_BELOW_2_9
    if VERSION < (2, 7):
        lacks |= LACKS_BELOW_2_7
    if find_spec('onnx') is None:
        lacks |= LACKS_WITHOUT_ONNX
    if VERSION >= (2, 6) and has_original_mmengine():
        lacks |= LACKS_WITH_ORIGINAL_MMENGINE
    return lacks


def has_original_mmengine() -> bool:
    """Whether OpenMMLab's mmengine is installed, and not the fork."""
    try:
        version('mmengine')
    except PackageNotFoundError:
        return False
    return True


def skip(items: list[pytest.Item]) -> None:
    for what, names in lacks_here().items():
        prefixes = tuple(f'tests/{name}' for name in names.split())
        for item in items:
            if item.nodeid.startswith(prefixes):
                item.add_marker(pytest.mark.skip(reason=f'this environment lacks {what}'))
