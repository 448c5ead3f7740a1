"""Muon for the hidden matrices of a model, on one rank or decentralized (SUDA-Muon)."""

from gossipgrad.muon._backbones import BACKBONES as BACKBONES
from gossipgrad.muon._backbones import ROTATING as ROTATING
from gossipgrad.muon._backbones import make_backbone as make_backbone
from gossipgrad.muon._graph import Graph as Graph
from gossipgrad.muon._graph import resolve_graph as resolve_graph
from gossipgrad.muon._muon import Muon as Muon
from gossipgrad.muon._polar import POLARS as POLARS
from gossipgrad.muon._polar import polarise as polarise
from gossipgrad.muon._polar import resolve_polar as resolve_polar
from gossipgrad.muon._session import SudaSession as SudaSession
from gossipgrad.muon._session import SudaSettings as SudaSettings
from gossipgrad.muon._session import SudaStats as SudaStats
from gossipgrad.muon._suda import resolve_settings as resolve_settings
from gossipgrad.muon._suda import suda as suda
