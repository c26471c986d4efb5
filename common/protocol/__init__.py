"""What a modality provides so that the harness can run it."""
