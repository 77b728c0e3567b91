"""Recurrent mixers: token mixers whose memory is a state of constant size."""
