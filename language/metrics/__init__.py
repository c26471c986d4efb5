"""What text models are measured by, from arrays alone: nothing here imports torch."""
