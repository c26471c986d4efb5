"""timm models."""
