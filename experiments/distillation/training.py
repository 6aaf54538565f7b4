"""The training of the student."""

import json
import time

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

from cpvt_pyramid import CPVTPyramid
from experiments.training import muon_and_adamw

from .photographs import Crops, load_photographs
from .teacher import TAPS, WEIGHTS, Teacher

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
WEIGHT_DECAY = 0.05
WARM_UP = 0.05  # share of the steps
TEMPERATURE = 2.0
LOGITS = 0.5  # weight of the loss of the logits; that of each map is 1
CALIBRATION = 8  # batches


class Student(nn.Module):
    """A pyramid with what it needs to be compared with the teacher: a linear map per stride from
    its channels to the teacher's, and a classifier of its last map's mean."""

    def __init__(self, arch: str, teacher_channels: list[int], classes: int) -> None:
        super().__init__()
        self.backbone = CPVTPyramid(arch)
        channels = [self.backbone.arch.dims[i] for i in range(len(TAPS))]
        self.projections = nn.ModuleList(
            nn.Conv2d(n, m, 1) for n, m in zip(channels, teacher_channels)
        )
        self.norm = nn.LayerNorm(channels[-1])
        self.classifier = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        maps = self.backbone((images - MEAN) / STD)
        logits = self.classifier(self.norm(maps[-1].mean((2, 3))))
        return [project(x) for project, x in zip(self.projections, maps)], logits


def distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Kullback-Leibler divergence of the classes, (), at a temperature."""
    ours = F.log_softmax(student / TEMPERATURE, 1)
    theirs = F.log_softmax(teacher / TEMPERATURE, 1)
    return F.kl_div(ours, theirs, reduction='batchmean', log_target=True) * TEMPERATURE**2


def optimizers_of(student: Student, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the backbone, AdamW for all other parameters."""
    matrices = [p for p in student.backbone.parameters() if p.ndim == 2]
    return muon_and_adamw(matrices, student, lr, WEIGHT_DECAY)


def train(out: str, arch: str, steps: int, batch: int, side: int, lr: float, seed: int) -> None:
    torch.manual_seed(seed)
    crops = Crops(load_photographs(), side, seed)
    teacher = Teacher()
    teacher.calibrate(torch.cat([crops.batch(batch) for _ in range(CALIBRATION)]))
    student = Student(arch, teacher.channels, classes=1000)
    optimizers = optimizers_of(student, lr)
    schedulers = [
        OneCycleLR(optimizer, lr, steps, pct_start=WARM_UP, cycle_momentum=False)
        for optimizer in optimizers
    ]
    totals = torch.zeros(len(TAPS) + 1)
    seconds = time.monotonic()
    for step in (progress := tqdm(range(steps), 'distillation', disable=None)):
        images = crops.batch(batch)
        wanted, wanted_logits = teacher(images)
        found, logits = student(images)
        losses = [F.mse_loss(x, y) for x, y in zip(found, wanted)]
        losses.append(LOGITS * distance(logits, wanted_logits))
        loss = torch.stack(losses)
        student.zero_grad()
        loss.sum().backward()
        nn.utils.clip_grad_norm_(student.parameters(), 5.0)
        for optimizer, scheduler in zip(optimizers, schedulers):
            optimizer.step()
            scheduler.step()
        totals += loss.detach()
        if (step + 1) % 100 == 0:
            names = [*(f'stride {stride}' for stride in TAPS), 'logits']
            means = ', '.join(f'{n} {v:.3f}' for n, v in zip(names, (totals / 100).tolist()))
            progress.write(f'step {step + 1}: {means}')
            totals.zero_()
    about = dict(
        arch=arch,
        teacher=f'{WEIGHTS.name} {WEIGHTS.version}',
        steps=steps,
        batch=batch,
        side=side,
        lr=lr,
        seed=seed,
        minutes=round((time.monotonic() - seconds) / 60),
    )
    weights = {name: x.half().contiguous() for name, x in student.backbone.state_dict().items()}
    save_file(weights, out, metadata={'distillation': json.dumps(about), 'licence': 'Apache-2.0'})
    print(f'{out}: {about}')
