#pragma once

#if __cplusplus < 202002L
#error "flash_attention's C++ headers need C++20: compile with -std=c++20 (flash_attention/c_api.h takes any standard)"
#endif
