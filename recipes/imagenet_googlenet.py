"""GoogLeNet on ImageNet at 128 workers by gossip, the other large workload of GossipGraD's paper.

`DATA` has `train/CLASS/*.jpg` and `val/CLASS/*.jpg`. Sixteen nodes with eight workers
each, by torchrun on every node:

    torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint NODE0:29500 \
        recipes/imagenet_googlenet.py --data-dir DATA --out runs/googlenet --device cuda

or by Slurm, once:

    srun --nodes 16 --ntasks-per-node 8 --cpus-per-task 8 \
        python recipes/imagenet_googlenet.py --data-dir DATA --out runs/googlenet \
        --device cuda --threads 8

From the authors' code: 32 images a worker (matex-org/caffe-nvidia, models/bvlc_googlenet), crops of
224 with mirroring, auxiliary losses weighted 0.3, a rate that falls in a straight line and is not
raised as workers are added, weights and momentum sent.

Not known to us, so those of Caffe's own quick solver stand here: rate 0.01, momentum 0.9, weight
decay 2e-4, and 60 epochs, which are its 2,400,000 iterations of 32 images. Not as theirs: BatchNorm
in place of local response normalisation.

This has not been run at 128 workers, nor on ImageNet, nor on a GPU, by us.
"""

import tyro

from gossipgrad.train import GossipConfig, TrainConfig, run

CONFIG = TrainConfig(
    data="imagefolder",
    model="googlenet",
    strategy="gossip",
    optimizer="sgd",
    epochs=60,
    batch_size=32,
    lr=0.01,
    lr_rule="none",
    lr_schedule="linear",
    momentum=0.9,
    weight_decay=2e-4,
    options={
        "gossip": GossipConfig(topology="dissemination", mode="overlap", payload="weights+state")
    },
)

if __name__ == "__main__":
    raise SystemExit(run(tyro.cli(TrainConfig, default=CONFIG)).exit_code)
