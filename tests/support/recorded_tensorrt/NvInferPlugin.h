#pragma once
inline bool initLibNvInferPlugins(void*, const char*) { return true; }
