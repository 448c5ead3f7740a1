"""Hugging Face's Trainer: a callback replaces DistributedDataParallel by gossip.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from gossipgrad.data import load_digits
from gossipgrad.integrations.transformers import GossipCallback  # added

images, labels = load_digits()
pixels = images.view(-1, 1, 8, 8)
rows = [{"pixel_values": x, "labels": int(y)} for x, y in zip(pixels, labels, strict=True)]
torch.manual_seed(0)
config = ViTConfig(
    image_size=8,
    patch_size=2,
    num_channels=1,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    num_labels=10,
)
trainer = Trainer(
    model=ViTForImageClassification(config),
    args=TrainingArguments(
        output_dir="vit",
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    ),
    train_dataset=rows[:1500],
    eval_dataset=rows[1500:],
    compute_metrics=lambda found: {
        "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())
    },
)
trainer.add_callback(GossipCallback(trainer))  # added
trainer.train()
accuracy = trainer.evaluate()["eval_accuracy"]
trainer.save_model("vit/final")
if trainer.is_world_process_zero():
    print(f"accuracy of the consensus {accuracy:.3f}")
