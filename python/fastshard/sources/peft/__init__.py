"""PEFT's LoRA adapters, with or without their base model."""
