/* CHECK and CHECK_OK for the C test programs: print the failed condition or error and its location, and abort. */
#ifndef OCP_TESTS_CHECK_H
#define OCP_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                                               \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      fprintf(stderr, "%s:%d: %s: CHECK(%s) failed\n", __FILE__, __LINE__, __func__, #condition);                      \
      abort();                                                                                                         \
    }                                                                                                                  \
  } while (0)

#define CHECK_OK(call)                                                                                                 \
  do {                                                                                                                 \
    ocp_error check_error = {0};                                                                                       \
    ocp_error *error = &check_error;                                                                                   \
    if ((call) != 0) {                                                                                                 \
      fprintf(stderr, "%s:%d: %s: %s failed: %s\n", __FILE__, __LINE__, __func__, #call, check_error.text);            \
      abort();                                                                                                         \
    }                                                                                                                  \
  } while (0)

#endif
