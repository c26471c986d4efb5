"""Unlearning methods of the literature that know no modality, one file each."""
