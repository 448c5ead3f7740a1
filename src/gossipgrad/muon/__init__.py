"""Muon for the hidden matrices of a model, alone or without a server (SUDA-Muon)."""

from gossipgrad.muon._muon import Muon as Muon
from gossipgrad.muon._polar import POLARS as POLARS
from gossipgrad.muon._polar import polarise as polarise
from gossipgrad.muon._polar import resolve_polar as resolve_polar
