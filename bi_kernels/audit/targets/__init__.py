"""What is audited as a whole: a decoder, models of Transformers, and a decoder over several ranks"""
