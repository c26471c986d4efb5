"""Tables, numbers and pictures that every report is made of."""
