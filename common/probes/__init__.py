"""Probes of any model; those that read data of a modality are with that modality."""
