"""LoRA adapters of PEFT, alone and on their base model."""
