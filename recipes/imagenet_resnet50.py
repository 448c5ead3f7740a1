"""ResNet-50 on ImageNet at 128 workers by gossip, the headline of GossipGraD's evaluation.

`DATA` has `train/CLASS/*.jpg` and `val/CLASS/*.jpg`. Sixteen nodes with eight workers
each, by torchrun on every node:

    torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint NODE0:29500 \
        recipes/imagenet_resnet50.py --data-dir DATA --out runs/resnet50 --device cuda

or by Slurm, once:

    srun --nodes 16 --ntasks-per-node 8 --cpus-per-task 8 \
        python recipes/imagenet_resnet50.py --data-dir DATA --out runs/resnet50 \
        --device cuda --threads 8

What the paper's abstract states: 128 P100 on InfiniBand, one partner a step that rotates, exchanges
behind the step's compute, top-1 accuracy "matching ... published in literature". From the authors'
code: dissemination or hypercube, weights and momentum sent, BatchNorm's statistics not.

Not known to us, so the usual ones stand here: 32 images a worker, SGD with momentum 0.9 and weight
decay 1e-4 for 90 epochs, and the rate of Goyal et al. (arXiv:1706.02677): 0.1 for 256 images, in
proportion to the batch, 5 epochs of warm-up, a tenth of it after 30, 60 and 80 epochs (here: every
30). The authors' code leaves the rate alone as workers are added: `--lr-rule none`.

This has not been run at 128 workers, nor on ImageNet, nor on a GPU, by us.
"""

import tyro

from gossipgrad.train import GossipConfig, TrainConfig, run

CONFIG = TrainConfig(
    data="imagefolder",
    model="resnet50",
    strategy="gossip",
    optimizer="sgd",
    epochs=90,
    batch_size=32,
    lr=0.1 * 32 / 256,
    lr_rule="linear",
    warmup_epochs=5,
    lr_schedule="step",
    lr_step_epochs=30,
    momentum=0.9,
    weight_decay=1e-4,
    options={
        "gossip": GossipConfig(topology="dissemination", mode="overlap", payload="weights+state")
    },
)

if __name__ == "__main__":
    raise SystemExit(run(tyro.cli(TrainConfig, default=CONFIG)).exit_code)
