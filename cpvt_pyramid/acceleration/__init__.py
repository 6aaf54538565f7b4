"""What makes models fast on a CPU. It is asked for: `cpvt_pyramid.accelerate(model)`.

Layers are computed by oneDNN's functions in PyTorch, and by functions of our own, in
kernels.cpp: patch embeddings, attention, layer norms, MLPs, PEGs, and depthwise convolutions with
their GELU.

Names that are private to PyTorch, all of them in this folder:
- `torch.ops.mkldnn._linear_pointwise` (products): oneDNN's product with its bias and a GELU.
  `F.linear` takes MKL, and the GELU is another pass.
- `torch.ops.aten.gelu_backward`, `torch.ops.aten._softmax_backward_data` (products, attention): the
  gradients of GELU and softmax, in one pass each.
- `torch.ops.mkldnn._convolution_pointwise` and `torch.ops.aten.convolution_backward` (conv_mlp): a
  depthwise convolution with its GELU, and the gradient of its weight alone.
- `torch.cpu._is_amx_tile_supported` (processor): whether the processor has AMX, which PyTorch's
  products use.
- `torch.ops.mkldnn._is_mkldnn_bf16_supported` (processor): whether there are products in bfloat16.
- `torch._C._is_tracing`, `torch._C._functorch.is_legacy_batchedtensor`,
  `torch._C._len_torch_dispatch_stack`, `torch._C._len_torch_function_stack` and
  `torch._C._get_function_stack_at` (ordinary, products): whether something sees or transforms
  PyTorch's operations, so that these must be called. `bfloat16` names those that it shares.
- `nn.Module._parameters` (ordinary): the parameters that a layer has itself.
"""
