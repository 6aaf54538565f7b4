# Runtime settings of all segmentation configs.
custom_imports = dict(imports=['cpvt_pyramid.mm.segmentation', 'cpvt_pyramid.app.training.hooks'])
default_scope = 'mmseg'
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(
        type='SafeCheckpointHook', by_epoch=False, interval=8000, max_keep_ckpts=2,
        save_best='mIoU', backend_args=dict(backend='atomic')),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    visualization=dict(type='SegVisualizationHook'),
    # registered by cpvt_pyramid.app.training.hooks; docs/training.md says what they do
    load_from=dict(type='LoadWhatFitsHook'),
    seed=dict(type='IterationSeedHook'),
    divergence=dict(type='StopOnDivergenceHook'),
    pictures=dict(type='ResultPicturesHook'),
    signals=dict(type='StopOnSignalHook'),
    resume=dict(type='ResumeHook'))
env_cfg = dict(
    cudnn_benchmark=True,  # all training crops have the same size
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'))
visualizer = dict(
    type='SegLocalVisualizer', name='visualizer', vis_backends=[dict(type='LocalVisBackend')])
log_processor = dict(by_epoch=False)
log_level = 'INFO'
load_from = None
resume = False
sync_bn = 'torch'  # synchronize batch norms across GPUs
