"""What attention is measured against: other libraries, formulas, and two models around them."""
