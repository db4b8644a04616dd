"""Trains a residual network for image classification: channels last, autocast, SGD with momentum, a learning-rate
schedule per step.

overlapc plan tests/launch/scripts/vision.py --world-size 8
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import overlapc

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--blocks", type=int, nargs=4, default=(3, 4, 6, 3))
parser.add_argument("--side", type=int, default=224)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=1)
args = parser.parse_args()


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        outputs = planes * self.expansion
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = conv3x3(planes, planes, stride), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inplanes != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, blocks: tuple[int, ...], width: int, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages, planes = [], width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stages.append(Bottleneck(planes, width * 2**stage, 2 if stage and not number else 1))
                planes = width * 2**stage * Bottleneck.expansion
        self.layers = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(planes, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)))


class Images(Dataset):
    def __len__(self) -> int:
        return 1_281_167

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.rand(3, args.side, args.side), number % 1000


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda", local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")
    loader = DataLoader(
        Images(), args.batch_size, sampler=DistributedSampler(Images()), num_workers=2, pin_memory=True, drop_last=True
    )

    model = ResNet(tuple(args.blocks), args.width).to(device, memory_format=torch.channels_last)
    mesh = init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    overlapc.fully_shard(model, mesh)  # in place of DistributedDataParallel
    compiled = torch.compile(model, backend="overlapc")
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=2e-5, nesterov=True)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))

    for epoch in range(args.epochs):
        model.train()
        loader.sampler.set_epoch(epoch)
        for images, target in loader:
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            target = target.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                output = compiled(images)
                loss = criterion(output, target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()


if __name__ == "__main__":
    main()
