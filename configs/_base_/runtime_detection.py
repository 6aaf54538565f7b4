# Runtime settings of all detection configs.
custom_imports = dict(imports=['cpvt_pyramid.mm.detection', 'cpvt_pyramid.app.training.hooks'])
default_scope = 'mmdet'
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(
        type='SafeCheckpointHook', interval=1, max_keep_ckpts=2, save_best='auto',
        backend_args=dict(backend='atomic')),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    visualization=dict(type='DetVisualizationHook'),
    # registered by cpvt_pyramid.app.training.hooks; docs/training.md says what they do
    load_from=dict(type='LoadWhatFitsHook'),
    seed=dict(type='IterationSeedHook'),
    divergence=dict(type='StopOnDivergenceHook'),
    pictures=dict(type='ResultPicturesHook'),
    signals=dict(type='StopOnSignalHook'),
    resume=dict(type='ResumeHook'))
env_cfg = dict(
    cudnn_benchmark=False,  # sizes vary from batch to batch
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'))
visualizer = dict(
    type='DetLocalVisualizer', name='visualizer', vis_backends=[dict(type='LocalVisBackend')])
log_processor = dict(type='LogProcessor', window_size=50, by_epoch=True)
log_level = 'INFO'
load_from = None
resume = False
